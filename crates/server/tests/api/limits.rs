//! Limits on how fast and how long.

use hyper::StatusCode;
use sandkeep_server::Limits;

use crate::fixture::Served;

#[tokio::test]
async fn too_many_requests_are_told_when_to_come_back() {
    let limits = Limits { requests_per_second: 0.1, burst: 3.0, ..Limits::default() };
    let served = Served::limited(limits).await;
    for _ in 0..3 {
        assert_eq!(served.get("/v1/whoami", &served.read).await.status, StatusCode::OK);
    }
    let answer = served.get("/v1/whoami", &served.read).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.error().code, "rate_limited");
    let seconds: u64 = answer.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=10).contains(&seconds), "{seconds}");
    assert_eq!(served.get("/v1/whoami", &served.write).await.status, StatusCode::OK);
}
