//! Requests that the daemon makes to addresses which callers chose: deliveries of webhooks.
//!
//! A user who may create a webhook must not reach what only this host can reach. So the address
//! that is dialled is checked, after the name was resolved and not before: a name that changes what
//! it resolves to changes nothing. Metadata services and addresses that no receiver has are refused
//! always; loopback, link-local and private ones, and the host's own, unless the operator allows
//! them. Redirects are not followed. Of an answer only the head is read.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_LENGTH, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;

use super::special_addresses::{self, Destination};
use super::upstream::Upstream;

/// The longest address.
const LONGEST_URL: usize = 2048;
/// How much an answer may have as its head.
const LARGEST_HEAD: usize = 64 << 10;

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostTarget {
    secure: bool,
    host: String,
    port: u16,
    /// The value of `Host`.
    authority: String,
    path: String,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The address is one that may not be dialled.
    #[error("{host} is at {address}, which is {why}")]
    Refused {
        /// The host.
        host: String,
        /// Its address.
        address: IpAddr,
        /// What it is.
        why: &'static str,
    },
    /// The name has no address.
    #[error("{0} has no address")]
    NoAddress(String),
    /// The address does not answer, or not in HTTP.
    #[error("{host}: {source}")]
    Io {
        /// The host.
        host: String,
        /// The error of the system, or of TLS.
        source: io::Error,
    },
    /// It broke off, or is no HTTP.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// It took too long.
    #[error("no answer within {} s", .0.as_secs_f32())]
    TooLate(Duration),
}

impl PostTarget {
    /// Reads an address.
    ///
    /// # Errors
    ///
    /// Returns what is wrong with it.
    pub fn parse(url: &str) -> Result<Self, String> {
        if url.len() > LONGEST_URL {
            return Err(format!("it is longer than {LONGEST_URL} bytes"));
        }
        if url.contains('#') {
            return Err("it must not have a fragment (`#…`)".to_owned());
        }
        let uri: Uri = url.parse().map_err(|error| format!("it is not a URL: {error}"))?;
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("it must begin with `https://` or `http://`".to_owned()),
        };
        let authority = uri.authority().ok_or("it has no host")?;
        if authority.as_str().contains('@') {
            return Err(
                "it must not have a user or a password; the signature tells who sends".to_owned()
            );
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() {
            return Err("it has no host".to_owned());
        }
        let port = match &authority.as_str()[authority.host().len()..] {
            "" if secure => 443,
            "" => 80,
            given => given.strip_prefix(':').and_then(|port| port.parse::<u16>().ok()).unwrap_or(0),
        };
        if port == 0 {
            return Err("its port is not a number from 1 to 65535".to_owned());
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let authority = authority.as_str().to_owned();
        Ok(Self { secure, host, port, authority, path })
    }
}

trait PostStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> PostStream for T {}

impl Upstream {
    /// Makes a POST request, and answers with its status and headers. All of it takes no longer than `within`.
    ///
    /// # Errors
    ///
    /// Returns [`PostError`] when there is no answer.
    pub async fn post(
        &self,
        target: &PostTarget,
        headers: HeaderMap,
        body: Bytes,
        allow_private: bool,
        within: Duration,
    ) -> Result<(u16, HeaderMap), PostError> {
        let exchange = self.exchange(target, headers, body, allow_private);
        tokio::time::timeout(within, exchange).await.map_err(|_| PostError::TooLate(within))?
    }

    async fn exchange(
        &self,
        target: &PostTarget,
        mut headers: HeaderMap,
        body: Bytes,
        allow_private: bool,
    ) -> Result<(u16, HeaderMap), PostError> {
        let failed = |source| PostError::Io { host: target.host.clone(), source };
        let stream = self.dial_checked(&target.host, target.port, allow_private).await?;
        let wire: Box<dyn PostStream> = match target.secure {
            false => Box::new(stream),
            true => {
                let name = ServerName::try_from(target.host.clone())
                    .map_err(|error| failed(io::Error::other(error)))?;
                // Only HTTP/1.1 is spoken here.
                let mut tls = rustls::ClientConfig::clone(&self.tls());
                tls.alpn_protocols = vec![b"http/1.1".to_vec()];
                let connector = TlsConnector::from(Arc::new(tls));
                Box::new(connector.connect(name, stream).await.map_err(failed)?)
            }
        };
        let broken = |error: hyper::Error| PostError::Broken(error.to_string());
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(LARGEST_HEAD)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(broken)?;
        let no_header = |error: hyper::header::InvalidHeaderValue| {
            PostError::Broken(format!("the host fits no header: {error}"))
        };
        headers.insert(HOST, HeaderValue::from_str(&target.authority).map_err(no_header)?);
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = target
            .path
            .parse()
            .map_err(|error| PostError::Broken(format!("the path is none: {error}")))?;
        *request.headers_mut() = headers;
        // Both end here: nothing of the body is read, and the connection is not used again.
        let response = sender.send_request(request);
        tokio::pin!(connection, response);
        let response = tokio::select! {
            response = &mut response => response,
            // The connection may end with the answer.
            _ = &mut connection => response.await,
        };
        let response = response.map_err(broken)?;
        Ok((response.status().as_u16(), response.headers().clone()))
    }

    /// Connects to the first address of a host that may be dialled and answers.
    async fn dial_checked(
        &self,
        host: &str,
        port: u16,
        allow_private: bool,
    ) -> Result<tokio::net::TcpStream, PostError> {
        let io = |source| PostError::Io { host: host.to_owned(), source };
        let mut last = PostError::NoAddress(host.to_owned());
        for address in self.addresses_of(host).await.map_err(io)? {
            if let Some(why) = self.why_not(address, allow_private) {
                last = PostError::Refused { host: host.to_owned(), address, why };
                continue;
            }
            match self.dial(SocketAddr::new(address, port)).await {
                Ok(stream) => return Ok(stream),
                Err(source) => last = io(source),
            }
        }
        Err(last)
    }

    /// Why the daemon does not dial an address for a caller.
    fn why_not(&self, ip: IpAddr, allow_private: bool) -> Option<&'static str> {
        let always = special_addresses::never_received(ip);
        if always.is_some() || allow_private {
            return always;
        }
        let own = self.is_own(Destination::new(SocketAddr::new(ip, 0)));
        special_addresses::inside(ip).or_else(|| own.then_some("the host's own address"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use bytes::Bytes;
    use hyper::header::HeaderMap;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::{PostError, PostTarget};
    use crate::net::{Upstream, UpstreamSettings};

    #[test]
    fn an_address_is_read_strictly() {
        let read =
            |url: &str| PostTarget::parse(url).map(|to| (to.secure, to.host, to.port, to.path));
        let ok = |secure, host: &str, port, path: &str| {
            Ok((secure, host.to_owned(), port, path.to_owned()))
        };
        assert_eq!(read("https://example.com"), ok(true, "example.com", 443, "/"));
        assert_eq!(read("http://example.com:81/a?b=c"), ok(false, "example.com", 81, "/a?b=c"));
        assert_eq!(read("http://[::1]:9/"), ok(false, "::1", 9, "/"));
        for bad in [
            "",
            "example.com",
            "/x",
            "ftp://x",
            "file:///etc/passwd",
            "https://",
            "https://u:p@x/",
            "https://x/#y",
            "https://x:0/",
            "https://x:99999/",
            "gopher://127.0.0.1",
        ] {
            assert!(PostTarget::parse(bad).is_err(), "{bad}");
        }
        assert!(PostTarget::parse(&format!("https://x/{}", "a".repeat(3000))).is_err());
    }

    fn upstream(hosts: &[(&str, &str)]) -> Upstream {
        let hosts = hosts.iter().map(|(name, ip)| ((*name).to_owned(), vec![ip.parse().unwrap()]));
        let hosts: BTreeMap<_, _> = hosts.collect();
        Upstream::new(UpstreamSettings { hosts, ..UpstreamSettings::default() }).unwrap()
    }

    async fn post(upstream: &Upstream, url: &str, allow: bool) -> Result<u16, PostError> {
        let target = PostTarget::parse(url).unwrap();
        let within = Duration::from_secs(2);
        let posted =
            upstream.post(&target, HeaderMap::new(), Bytes::from("{}"), allow, within).await;
        posted.map(|(status, _)| status)
    }

    #[tokio::test]
    async fn what_only_this_host_reaches_is_not_dialled() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let upstream = upstream(&[
            ("inside.test", "127.0.0.1"),
            ("meta.test", "169.254.169.254"),
            ("mapped.test", "::ffff:127.0.0.1"),
        ]);
        for host in [
            "127.0.0.1",
            "[::1]",
            "0.0.0.0",
            "[::]",
            "169.254.169.254",
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "100.64.0.1",
            "[fe80::1]",
            "[fc00::1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:169.254.169.254]",
            "[64:ff9b::7f00:1]",
            "[2002:7f00:1::]",
            "224.0.0.1",
            "inside.test",
            "meta.test",
            "mapped.test",
        ] {
            let refused = post(&upstream, &format!("http://{host}:{port}/"), false).await;
            assert!(matches!(refused, Err(PostError::Refused { .. })), "{host}: {refused:?}");
        }
        // Written as numbers, which some resolvers take for addresses.
        for host in ["2130706433", "0x7f000001", "0177.0.0.1", "127.1"] {
            let refused = post(&upstream, &format!("http://{host}:{port}/"), false).await;
            assert!(refused.is_err(), "{host}: {refused:?}");
        }
        // Whatever the operator allows, these have no receivers.
        for host in ["0.0.0.0", "[::]", "169.254.169.254", "meta.test", "[::ffff:127.0.0.1]"] {
            let refused = post(&upstream, &format!("http://{host}:{port}/"), true).await;
            assert!(matches!(refused, Err(PostError::Refused { .. })), "{host}: {refused:?}");
        }
        let nobody = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
        assert!(nobody.is_err(), "nobody was dialled");
    }

    #[tokio::test]
    async fn answers_are_read_within_bounds() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let upstream = upstream(&[]);
        let answers: [&'static [u8]; 4] = [
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\n\r\n",
            b"220 mail.example ESMTP\r\n",
            b"",
        ];
        let server = tokio::spawn(async move {
            let mut heads = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = vec![0; 4096];
                let length = stream.read(&mut head).await.unwrap();
                heads.push(String::from_utf8_lossy(&head[..length]).into_owned());
                stream.write_all(answer).await.unwrap();
            }
            // One that sends nothing, and one that never ends its head.
            let (_silent, _) = listener.accept().await.unwrap();
            let (mut endless, _) = listener.accept().await.unwrap();
            let _ = endless.write_all(b"HTTP/1.1 200 OK\r\n").await;
            while endless.write_all(b"x: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n").await.is_ok() {}
            heads
        });
        let url = format!("http://127.0.0.1:{port}/hook?a=1");
        assert_eq!(post(&upstream, &url, true).await.unwrap(), 204);
        assert_eq!(post(&upstream, &url, true).await.unwrap(), 302, "it is not followed");
        for _ in 0..2 {
            assert!(matches!(post(&upstream, &url, true).await, Err(PostError::Broken(_))));
        }
        assert!(matches!(post(&upstream, &url, true).await, Err(PostError::TooLate(_))));
        assert!(post(&upstream, &url, true).await.is_err());
        let heads = server.await.unwrap();
        assert!(heads[0].starts_with("POST /hook?a=1 HTTP/1.1\r\n"), "{heads:?}");
        assert!(heads[0].contains(&format!("host: 127.0.0.1:{port}\r\n")), "{heads:?}");
    }
}
