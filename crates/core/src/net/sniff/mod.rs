//! Reads the name off a connection's first bytes: a TLS server name, or an HTTP/1 host.
//!
//! Nothing is trusted and nothing is kept: [`look`] is given all bytes so far and returns what they
//! are, or that it needs more. It looks at no more than [`MOST`] bytes; a connection without a name
//! in those has none.
//!
//! Servers read more than the standards allow: two spaces in a request line, HTTP/0.9, records of versions that never
//! were. So what looks like TLS or HTTP to any server is called that, without a name;
//! [`Sniffed::Other`] is what no such server would answer.

use std::net::IpAddr;

/// How many bytes are looked at.
pub(super) const MOST: usize = 16 << 10;

/// What first bytes show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sniffed {
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

/// Returns what the first bytes of a connection show.
pub(super) fn look(bytes: &[u8]) -> Sniffed {
    let told = match bytes.first() {
        None => Sniffed::More,
        Some(20..=23) => tls(bytes),
        Some(0x80..) => old_tls(bytes),
        Some(_) => http(bytes),
    };
    match told {
        // A client that sends this much without a name has none.
        Sniffed::More if bytes.len() >= MOST && bytes[0] == 22 => Sniffed::Tls(None),
        Sniffed::More if bytes.len() >= MOST => Sniffed::Http(None),
        told => told,
    }
}

/// Returns what the first bytes of a connection show when no more will come. A head may lack its
/// end: some server answers it.
pub(super) fn look_at_all(bytes: &[u8]) -> Sniffed {
    match look(bytes) {
        Sniffed::More if matches!(bytes.first(), Some(20..=23 | 0x80..)) => Sniffed::Tls(None),
        Sniffed::More => match look(&[bytes, b"\n\n"].concat()) {
            Sniffed::Other => Sniffed::Other,
            _ => Sniffed::Http(None),
        },
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

    /// A vector: its length, then that many bytes.
    fn vector(&mut self, width: usize) -> Option<Bytes<'a>> {
        let length = self.number(width)?;
        self.take(length).map(Bytes)
    }
}

/// The handshake may be cut into records at any byte, so their contents are joined first. Of a record's version servers
/// look at the first byte, if at all, and some pass over empty records and alerts.
fn tls(bytes: &[u8]) -> Sniffed {
    let mut handshake = Vec::new();
    let mut rest = bytes;
    loop {
        // An odd record is recognized from its first bytes, not when it is whole.
        let header = &rest[..rest.len().min(5)];
        let fits = |index: usize, fine: u8| header.get(index).is_none_or(|byte| *byte == fine);
        if !(fits(0, 22) && fits(1, 3)) {
            return Sniffed::Tls(None);
        }
        let &[_, _, _, high, low] = header else { return Sniffed::More };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > (1 << 14) + 256 {
            return Sniffed::Tls(None);
        }
        let end = rest.len().min(5 + length);
        handshake.extend_from_slice(&rest[5..end]);
        match greeting(&handshake) {
            Sniffed::More if end < 5 + length => return Sniffed::More,
            Sniffed::More => rest = &rest[end..],
            told => return told,
        }
    }
}

/// A greeting in the form of SSL 2, which has no name: two bytes of length, then its kind and a version.
fn old_tls(bytes: &[u8]) -> Sniffed {
    match bytes {
        [_] | [_, _] | [_, _, 1] => Sniffed::More,
        [_, _, 1, 0 | 2 | 3, ..] => Sniffed::Tls(None),
        _ => http(bytes),
    }
}

fn greeting(handshake: &[u8]) -> Sniffed {
    if handshake.first().is_some_and(|kind| *kind != 1) {
        return Sniffed::Tls(None);
    }
    let mut bytes = Bytes(handshake);
    let Some(length) = bytes.take(1).and_then(|_| bytes.number(3)) else { return Sniffed::More };
    match bytes.take(length) {
        None if length > MOST => Sniffed::Tls(None),
        None => Sniffed::More,
        Some(hello) => Sniffed::Tls(server_name(Bytes(hello))),
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

fn http(bytes: &[u8]) -> Sniffed {
    // Servers pass over empty lines before a request, and some over any space.
    let begin = bytes.iter().position(|byte| !is_gap(*byte) && *byte != b'\n');
    let (before, bytes) = bytes.split_at(begin.unwrap_or(bytes.len()));
    let common = bytes.len().min(PREFACE.len());
    if bytes[..common] == PREFACE[..common] {
        return if common == PREFACE.len() { Sniffed::Http2 } else { Sniffed::More };
    }
    match is_request(bytes) {
        None => return Sniffed::More,
        Some(false) => return Sniffed::Other,
        Some(true) => {}
    }
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else { return Sniffed::More };
    let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
    let plain = before.iter().all(|byte| b"\r\n".contains(byte));
    let Some(target) = request_target(line).filter(|_| plain) else { return Sniffed::Http(None) };
    let Some(host) = host(&bytes[end + 1..]) else { return Sniffed::More };
    Sniffed::Http(match (absolute(target), host) {
        // A proxy goes by the target, a server by the header: they must not differ.
        (Some(target), Some(host)) if target != host => None,
        (Some(target), _) => Some(target),
        (None, host) => host,
    })
}

/// What some server takes for the space between two words.
fn is_gap(byte: u8) -> bool {
    matches!(byte, b'\t' | 0x0b | 0x0c | b'\r' | 0x1c..=0x20 | 0x85 | 0xa0)
}

/// What a method may consist of.
fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Whether some server would take this for a request: a word, then a path, a URL, or anything on a
/// line with "HTTP" in it. `None` if it takes more bytes to decide.
fn is_request(bytes: &[u8]) -> Option<bool> {
    let word = bytes.iter().position(|byte| !is_word(*byte))?;
    let (method, rest) = bytes.split_at(word);
    if method.is_empty() || !is_gap(rest[0]) {
        return Some(false);
    }
    let rest = &rest[rest.iter().position(|byte| !is_gap(*byte))?..];
    if rest[0] == b'/' {
        // Git's own protocol has a length and a service before the path, and a NUL after it.
        let is_git = method.get(4..).is_some_and(|service| service.starts_with(b"git-"));
        return if is_git {
            rest.iter().find(|byte| b"\0\n".contains(byte)).map(|byte| *byte == b'\n')
        } else {
            Some(true)
        };
    }
    let end = rest.iter().position(|byte| *byte == b'\n' || (*byte < b' ' && !is_gap(*byte)));
    let lower = rest[..end.unwrap_or(rest.len())].to_ascii_lowercase();
    let speaks_of_it = lower.windows(5).any(|window| window == b"http/")
        || [&b"http://"[..], b"https://"].iter().any(|scheme| lower.starts_with(scheme));
    if speaks_of_it { Some(true) } else { end.map(|_| false) }
}

/// The target of a request line, if it is one of HTTP/1 to the letter.
fn request_target(line: &[u8]) -> Option<&[u8]> {
    let mut parts = line.split(|byte| *byte == b' ');
    let (_, target, version) = (parts.next()?, parts.next()?, parts.next()?);
    let fine = !target.is_empty() && line.iter().all(|byte| *byte >= b' ');
    let known = matches!(version, b"HTTP/1.0" | b"HTTP/1.1");
    (fine && known && parts.next().is_none()).then_some(target)
}

/// The host of a target that is a whole URL.
fn absolute(target: &[u8]) -> Option<String> {
    let lower = target.to_ascii_lowercase();
    let rest = lower.strip_prefix(b"http://").or_else(|| lower.strip_prefix(b"https://"))?;
    let end = rest.iter().position(|byte| b"/?#".contains(byte)).unwrap_or(rest.len());
    let authority = rest[..end].rsplit(|byte| *byte == b'@').next()?;
    name(without_port(authority))
}

/// The host in the header lines, if they have one; `None` when their end has not come.
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
