//! Which names and web pages may reach the server.

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;

use crate::fixture::{Answer, Served, read};

async fn asked(served: &Served, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::get(path).header("authorization", format!("Bearer {}", served.read));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    read(served.send(request.body(Full::new(Bytes::new())).unwrap()).await).await
}

#[tokio::test]
async fn a_name_that_was_rebound_to_loopback_is_refused() {
    let served = Served::without_machines().await;
    let port = served.address.port();
    for host in ["localhost", "127.0.0.1", "[::1]", "keep.test", "sandkeep"] {
        for host in [host.to_owned(), format!("{host}:{port}")] {
            let answer = asked(&served, "/v1/whoami", &[("host", &host)]).await;
            assert_eq!(answer.status, StatusCode::OK, "{host}");
        }
    }
    for path in ["/v1/whoami", "/healthz", "/_port/main/box/3000/"] {
        let host = format!("rebound.example:{port}");
        let answer = asked(&served, path, &[("host", &host)]).await;
        assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST, "{path}");
        assert_eq!(answer.error().code, "unknown_host");
    }
    // No page reaches the Unix socket.
    let stream = tokio::net::UnixStream::connect(&served.socket).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("/healthz").header("host", "anything.example");
    let request = request.body(Full::new(Bytes::new())).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn pages_of_other_origins_do_not_reach_the_api() {
    let served = Served::without_machines().await;
    let host = ("host", "localhost:7777");
    for (header, allowed) in [
        (("origin", "http://localhost:7777"), true),
        (("origin", "https://console.test"), true),
        (("origin", "https://evil.example"), false),
        (("origin", "null"), false),
        (("sec-fetch-site", "same-origin"), true),
        (("sec-fetch-site", "none"), true),
        (("sec-fetch-site", "same-site"), false),
        (("sec-fetch-site", "cross-site"), false),
    ] {
        let answer = asked(&served, "/v1/whoami", &[host, header]).await;
        if allowed {
            assert_eq!(answer.status, StatusCode::OK, "{header:?}");
        } else {
            assert_eq!(answer.status, StatusCode::FORBIDDEN, "{header:?}");
            assert_eq!(answer.error().code, "cross_origin");
        }
    }
    // What Vercel's clients speak is the API too; what ports serve is not.
    let evil = ("origin", "https://evil.example");
    let answer = asked(&served, "/v2/sandboxes/sessions", &[host, evil]).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    let answer = asked(&served, "/_port/main/nobody/3000/", &[host, evil]).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
}
