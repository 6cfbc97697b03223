//! Lists: pages that join up, filters that must all fit.

use hyper::{Method, StatusCode};
use serde_json::Value;

use crate::fixture::Served;

/// Every name on every page of a list.
async fn names(served: &Served, query: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut cursor = String::new();
    loop {
        let path = format!("/v1/sandboxes?{query}{cursor}");
        let answer = served.get(&path, &served.read).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {answer:?}");
        let page = answer.json();
        let items = page["items"].as_array().unwrap();
        found.extend(items.iter().map(|item| item["name"].as_str().unwrap().to_owned()));
        match &page["next"] {
            Value::Null => return found,
            next => cursor = format!("&cursor={}", next.as_str().unwrap()),
        }
    }
}

#[tokio::test]
async fn pages_join_up_to_the_whole() {
    let served = Served::without_machines().await;
    for number in 0..7 {
        served.create(&format!("box-{number}")).await;
    }
    let mut expected: Vec<String> = (0..7).map(|number| format!("box-{number}")).collect();
    for limit in [1, 2, 3, 7, 100] {
        let mut found = names(&served, &format!("limit={limit}")).await;
        found.sort();
        assert_eq!(found, expected, "limit {limit}");
    }
    // What is deleted between two pages is missed; nothing is shown twice.
    let page = served.get("/v1/sandboxes?limit=3", &served.read).await.json();
    let next = page["next"].as_str().unwrap().to_owned();
    let gone = served.call(Method::DELETE, "/v1/sandboxes/box-0", &served.write).await;
    assert_eq!(gone.status, StatusCode::OK, "{gone:?}");
    let rest = served.get(&format!("/v1/sandboxes?cursor={next}"), &served.read).await.json();
    let count = page["items"].as_array().unwrap().len() + rest["items"].as_array().unwrap().len();
    assert_eq!(count, 6);
    expected.remove(0);
    let mut found = names(&served, "limit=4").await;
    found.sort();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn filters_must_all_fit() {
    let served = Served::without_machines().await;
    for (name, rest) in [
        ("app-a", r#""tags":{"customer":"acme","agent":"1"}"#),
        ("app-b", r#""tags":{"customer":"acme","agent":"2"},"class":"workspace""#),
        ("tool", r#""tags":{"customer":"a=b&c"},"class":"ephemeral""#),
    ] {
        let body = format!(r#"{{"name":"{name}","image":"small","start":false,{rest}}}"#);
        let made = served.post("/v1/sandboxes", &served.write, &body).await;
        assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    }
    for (query, expected) in [
        ("tag=customer=acme", vec!["app-a", "app-b"]),
        ("tag=customer=acme&tag=agent=2", vec!["app-b"]),
        ("tag=customer=acme&tag=agent=3", vec![]),
        ("tag=customer=a%3Db%26c", vec!["tool"]),
        ("name_prefix=app-", vec!["app-a", "app-b"]),
        ("name_prefix=app_", vec![]),
        ("class=workspace", vec!["app-b"]),
        ("state=stopped&name_prefix=t", vec!["tool"]),
        ("state=running", vec![]),
    ] {
        let mut found = names(&served, query).await;
        found.sort();
        assert_eq!(found, expected, "{query}");
    }
}
