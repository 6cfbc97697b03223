//! Reads the name off a connection's first bytes: a TLS server name, or an HTTP/1 host.
//!
//! Nothing is trusted and nothing is kept: [`look`] is given all bytes so far and says what they are, or that it takes
//! more to tell. It looks at no more than [`MOST`] bytes; whatever has not told its name by then tells none.

use std::net::IpAddr;

/// How many bytes are looked at.
pub(super) const MOST: usize = 16 << 10;

/// What first bytes tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    /// Not yet enough: they may still become TLS or HTTP.
    More,
    /// A TLS greeting, with the name of the server it is for; `None` if it has none that is a name.
    Tls(Option<String>),
    /// The head of an HTTP/1 request, with the host it is for.
    Http(Option<String>),
    /// The beginning of HTTP/2 without TLS: what it is for comes later.
    Http2,
    /// Neither.
    Other,
}

/// What the first bytes of a connection tell.
pub(super) fn look(bytes: &[u8]) -> Told {
    let told = match bytes.first() {
        None => Told::More,
        Some(22) => tls(bytes),
        Some(_) => http(bytes),
    };
    match told {
        // Whoever says so much without a name has none.
        Told::More if bytes.len() >= MOST && bytes[0] == 22 => Told::Tls(None),
        Told::More if bytes.len() >= MOST => Told::Http(None),
        told => told,
    }
}

/// A name as rules speak of it: in lower case, without a final dot. Addresses are none.
pub(super) fn name(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let text = text.strip_suffix('.').unwrap_or(text);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(plain);
    let fine = text.len() <= 253 && text.split('.').all(label) && text.parse::<IpAddr>().is_err();
    fine.then(|| text.to_ascii_lowercase())
}

/// Takes from the front of some bytes; `None` when there are too few.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn number(&mut self, width: usize) -> Option<usize> {
        Some(self.take(width)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    /// A vector: its length, then so many bytes.
    fn vector(&mut self, width: usize) -> Option<Bytes<'a>> {
        let length = self.number(width)?;
        self.take(length).map(Bytes)
    }
}

/// The handshake may be cut into records at any byte, so their contents are joined first.
fn tls(bytes: &[u8]) -> Told {
    let mut handshake = Vec::new();
    let mut rest = bytes;
    loop {
        // What cannot be a record of a handshake is told from its first bytes, not when the record is whole.
        let header = &rest[..rest.len().min(5)];
        let fits = |index: usize, fine: fn(u8) -> bool| header.get(index).is_none_or(|b| fine(*b));
        if !(fits(0, |kind| kind == 22)
            && fits(1, |major| major == 3)
            && fits(2, |minor| minor <= 4))
        {
            return Told::Other;
        }
        let &[_, _, _, high, low] = header else { return Told::More };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > (1 << 14) + 256 {
            return Told::Other;
        }
        let end = rest.len().min(5 + length);
        handshake.extend_from_slice(&rest[5..end]);
        match greeting(&handshake) {
            Told::More if end < 5 + length => return Told::More,
            Told::More => rest = &rest[end..],
            told => return told,
        }
    }
}

fn greeting(handshake: &[u8]) -> Told {
    if handshake.first().is_some_and(|kind| *kind != 1) {
        return Told::Other;
    }
    let mut bytes = Bytes(handshake);
    let Some(length) = bytes.take(1).and_then(|_| bytes.number(3)) else { return Told::More };
    match bytes.take(length) {
        None if length > MOST => Told::Tls(None),
        None => Told::More,
        Some(hello) => Told::Tls(server_name(Bytes(hello))),
    }
}

/// The server name of a whole ClientHello.
fn server_name(mut hello: Bytes<'_>) -> Option<String> {
    hello.take(2 + 32)?; // version, random
    hello.vector(1)?; // session
    hello.vector(2)?; // cipher suites
    hello.vector(1)?; // compression
    let mut extensions = hello.vector(2)?;
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)?;
        let mut body = extensions.vector(2)?;
        if kind == 0 {
            // Twice the same extension is a lie to somebody.
            if found.is_some() {
                return None;
            }
            let mut list = body.vector(2)?;
            let is_host = list.number(1)? == 0;
            let host = list.vector(2)?;
            if !is_host || !list.0.is_empty() {
                return None;
            }
            found = Some(name(host.0)?);
        }
    }
    found
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";

fn http(bytes: &[u8]) -> Told {
    // Servers pass over empty lines before a request.
    let begin = bytes.iter().position(|byte| !b"\r\n".contains(byte)).unwrap_or(bytes.len());
    let bytes = &bytes[begin..];
    let common = bytes.len().min(PREFACE.len());
    if bytes[..common] == PREFACE[..common] {
        return if common == PREFACE.len() { Told::Http2 } else { Told::More };
    }
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        return if may_begin_request(bytes) { Told::More } else { Told::Other };
    };
    let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
    let Some(target) = request_target(line) else { return Told::Other };
    let Some(host) = host(&bytes[end + 1..]) else { return Told::More };
    Told::Http(match (absolute(target), host) {
        // A proxy goes by the target, a server by the header: they must not differ.
        (Some(target), Some(host)) if target != host => None,
        (Some(target), _) => Some(target),
        (None, host) => host,
    })
}

/// Whether bytes without an end of line can be the beginning of a request line.
fn may_begin_request(bytes: &[u8]) -> bool {
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    let method = bytes.iter().position(|byte| *byte == b' ').unwrap_or(bytes.len());
    let letter = |byte: &u8| byte.is_ascii_alphabetic() || matches!(byte, b'-' | b'_');
    method <= 20 && bytes[..method].iter().all(letter) && bytes[method..].iter().all(|b| *b >= b' ')
}

/// The target of a request line, if it is one of HTTP/1.
fn request_target(line: &[u8]) -> Option<&[u8]> {
    let mut parts = line.split(|byte| *byte == b' ');
    let (method, target, version) = (parts.next()?, parts.next()?, parts.next()?);
    let fine = may_begin_request(line) && !method.is_empty() && !target.is_empty();
    (fine && parts.next().is_none() && version.starts_with(b"HTTP/1.")).then_some(target)
}

/// The host of a target that is a whole URL.
fn absolute(target: &[u8]) -> Option<String> {
    let lower = target.to_ascii_lowercase();
    let rest = lower.strip_prefix(b"http://").or_else(|| lower.strip_prefix(b"https://"))?;
    let end = rest.iter().position(|byte| b"/?#".contains(byte)).unwrap_or(rest.len());
    let authority = rest[..end].rsplit(|byte| *byte == b'@').next()?;
    name(without_port(authority))
}

/// The host that the header lines tell, if they tell one; `None` when their end has not come.
fn host(mut rest: &[u8]) -> Option<Option<String>> {
    let mut hosts = Vec::new();
    loop {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
        rest = &rest[end + 1..];
        if line.is_empty() {
            // Two hosts are a lie to somebody.
            return Some(if hosts.len() == 1 { hosts.pop().flatten() } else { None });
        }
        // What one reader takes for the last line going on is a line of its own to another.
        let colon = line.iter().position(|byte| *byte == b':');
        let Some(colon) = colon.filter(|_| !line[0].is_ascii_whitespace()) else {
            return Some(None);
        };
        if line[..colon].trim_ascii().eq_ignore_ascii_case(b"host") {
            hosts.push(name(without_port(line[colon + 1..].trim_ascii())));
        }
    }
}

fn without_port(authority: &[u8]) -> &[u8] {
    match authority.iter().position(|byte| *byte == b':') {
        Some(colon) if authority[colon + 1..].iter().all(u8::is_ascii_digit) => &authority[..colon],
        _ => authority,
    }
}

#[cfg(test)]
pub(super) mod tests;
