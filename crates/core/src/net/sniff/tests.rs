use std::sync::Arc;

use proptest::prelude::*;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::{MOST, Sniffed, look, look_at_all};

/// What a real client says first.
pub(in crate::net) fn hello(server: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let server = server.to_owned().try_into().unwrap();
    let mut client = ClientConnection::new(Arc::new(config), server).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

fn tls(name: &str) -> Sniffed {
    Sniffed::Tls(Some(name.to_owned()))
}

fn http(name: &str) -> Sniffed {
    Sniffed::Http(Some(name.to_owned()))
}

/// The same handshake in records of `size` bytes.
fn in_records(hello: &[u8], size: usize) -> Vec<u8> {
    let pieces = hello[5..].chunks(size);
    let record = |piece: &[u8]| {
        let length = u16::try_from(piece.len()).unwrap().to_be_bytes();
        [&hello[..3], &length, piece].concat()
    };
    pieces.flat_map(record).collect()
}

#[test]
fn a_server_name_is_read_however_it_is_cut() {
    let hello = hello("www.Example.com");
    assert_eq!(look(&hello), tls("www.example.com"));
    for size in [1, 2, 7, 100, 1 << 14] {
        let cut = in_records(&hello, size);
        assert_eq!(look(&cut), tls("www.example.com"), "records of {size}");
        let last = if size == 1 { cut.len() - 1 } else { cut.len() / 2 };
        for count in 0..last.min(600) {
            assert_eq!(look(&cut[..count]), Sniffed::More, "{count} bytes in records of {size}");
        }
    }
}

#[test]
fn a_greeting_without_a_name_tells_none() {
    assert_eq!(look(&hello("192.0.2.1")), Sniffed::Tls(None));
    let good = hello("www.example.com");
    let at = good.windows(15).position(|window| window == b"www.example.com").unwrap();
    // The name is of another kind, holds a NUL, or is longer than its list.
    for (index, byte) in [(at - 3, 1), (at + 3, 0), (at + 3, b' '), (at - 1, 200), (at - 4, 1)] {
        let mut bad = good.clone();
        bad[index] = byte;
        assert_eq!(look(&bad), Sniffed::Tls(None), "byte {index} is {byte}");
    }
}

#[test]
fn a_greeting_that_never_ends_is_given_up() {
    let mut long = vec![22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xff];
    long.resize(MOST - 1, 0);
    assert_eq!(look(&long), Sniffed::More);
    long.push(0);
    assert_eq!(look(&long), Sniffed::Tls(None));
    assert_eq!(look(&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff]), Sniffed::Tls(None));
    let mut head = b"GET / HTTP/1.1\r\nX: ".to_vec();
    head.resize(MOST, b'x');
    assert_eq!(look(&head), Sniffed::Http(None));
}

#[test]
fn a_host_is_read_off_a_request() {
    for (head, told) in [
        ("GET / HTTP/1.1\r\nHost: Example.com\r\n\r\n", http("example.com")),
        ("GET / HTTP/1.1\nhost:example.com:8080\n\n", http("example.com")),
        ("\r\nPOST /x HTTP/1.1\r\nA: b\r\nHOST: a.example.\r\n\r\nbody", http("a.example")),
        ("GET http://a.example/x HTTP/1.1\r\nHost: a.example\r\n\r\n", http("a.example")),
        ("GET http://u@a.example:80 HTTP/1.0\r\n\r\n", http("a.example")),
        ("CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n", http("a.example")),
        ("get / HTTP/1.1\r\nHost: a.example\r\n\r\n", http("a.example")),
        // Contradicting names count as none.
        ("GET http://a.example/ HTTP/1.1\r\nHost: b.example\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nX: y\r\n Host: a.example\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nHost : a.example\r\n\r\n", http("a.example")),
        ("GET / HTTP/1.1\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\r\nHost: a.exa", Sniffed::More),
        ("GET / HT", Sniffed::More),
        ("G", Sniffed::More),
        ("", Sniffed::More),
        ("PRI * HTTP/2.0\r\n", Sniffed::Http2),
        ("PRI * HTT", Sniffed::More),
        ("SSH-2.0-OpenSSH_9.2\r\n", Sniffed::Other),
        ("EHLO a.example\r\n", Sniffed::Other),
        ("*1\r\n$4\r\nPING\r\n", Sniffed::Other),
        ("\0\0\0\u{8}\u{4}", Sniffed::Other),
        ("PING\r\n", Sniffed::Other),
        ("get key\r\n", Sniffed::Other),
        ("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", Sniffed::Other),
        ("0032git-upload-pack /project.git\0host=a.example\0", Sniffed::Other),
        ("AMQP\0\0\u{9}\u{1}", Sniffed::Other),
        // What a server may take for a request all the same.
        ("GET /\r\n", Sniffed::Http(None)),
        ("DELETE  /x HTTP/1.1\r\n", Sniffed::Http(None)),
        ("DELETE\t/x\tHTTP/1.1\r\n", Sniffed::Http(None)),
        (" GET / HTTP/1.1\r\n", Sniffed::Http(None)),
        ("GET x HTTP/1.1 \r\n", Sniffed::Http(None)),
        ("GET HTTP://a.example\r\n", Sniffed::Http(None)),
        ("GET / HTTP/1.1\rHost: a.example\r\n", Sniffed::Http(None)),
        ("GET /\u{1} HTTP/1.1\r\n", Sniffed::Http(None)),
        (
            "M3!THOD-THAT-IS-LONGER-THAN-ANY / HTTP/1.1\r\nHost: a.example\r\n\r\n",
            http("a.example"),
        ),
    ] {
        assert_eq!(look(head.as_bytes()), told, "{head:?}");
        // However it is cut, there is no other answer on the way.
        for count in 0..head.len() {
            let early = look(&head.as_bytes()[..count]);
            assert!(
                early == Sniffed::More || early == told,
                "{count} bytes of {head:?}: {early:?}"
            );
        }
    }
}

#[test]
fn odd_tls_is_tls() {
    let good = hello("www.example.com");
    let mut odd = good.clone();
    odd[2] = 5;
    assert_eq!(look(&odd), tls("www.example.com"));
    for before in [&[22, 3, 1, 0, 0][..], &[21, 3, 1, 0, 2, 1, 0], &[20, 3, 3, 0, 1, 1], &[23, 3]] {
        assert_eq!(look(&[before, &good].concat()), Sniffed::Tls(None), "{before:?}");
    }
    for odd in [&[22, 2][..], &[22, 3, 1, 0, 4, 2], &[0x80, 0x2e, 1, 3, 1], &[0x81, 0, 1, 0, 2]] {
        assert_eq!(look(odd), Sniffed::Tls(None), "{odd:?}");
    }
    assert_eq!(look(&[0xf9, 0xbe, 0xb4, 0xd9]), Sniffed::Other);
}

#[test]
fn a_head_without_its_end_is_one() {
    for (all, told) in [
        ("DELETE /x HTTP/1.1\r\nHost: a.example\r\n", Sniffed::Http(None)),
        ("DELETE /x HTTP/1.1", Sniffed::Http(None)),
        ("GET /x", Sniffed::Http(None)),
        ("ruok", Sniffed::Other),
        ("PRI * HTTP/2.0\r\n", Sniffed::Http2),
    ] {
        assert_eq!(look_at_all(all.as_bytes()), told, "{all:?}");
    }
    assert_eq!(look_at_all(&hello("a.example")[..50]), Sniffed::Tls(None));
}

fn first_bytes() -> impl Strategy<Value = Vec<u8>> {
    let request = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example:80\r\nX: y\r\n\r\n".to_vec();
    let noise = prop::collection::vec(any::<u8>(), 0..600);
    let seeds = prop_oneof![Just(hello("www.example.com")), Just(request), noise];
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8);
    (seeds, changes).prop_map(|(mut bytes, changes)| {
        for (at, byte) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        bytes
    })
}

proptest! {
    #[test]
    fn any_bytes_are_looked_at_and_later_ones_change_nothing(
        bytes in first_bytes(), more in prop::collection::vec(any::<u8>(), 0..64)
    ) {
        let mut told = Sniffed::More;
        for count in 0..=bytes.len() {
            let now = look(&bytes[..count]);
            if told != Sniffed::More {
                prop_assert_eq!(&now, &told, "at {} bytes", count);
            }
            told = now;
        }
        if told != Sniffed::More {
            prop_assert_eq!(look(&[bytes, more].concat()), told);
        }
    }
}
