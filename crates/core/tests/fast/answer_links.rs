//! Approvals that the receiver of a webhook answers with a link.

use std::time::Duration;

use sandkeep_core::engine::{AskRequest, Caller, CreateWebhook, Engine, UpdateWebhook};
use sandkeep_core::model::{
    Answerer, Approval, ApprovalAnswer, ApprovalId, ApprovalStatus, KeyId, ProjectRuns, Scope,
    Span, WebhookId,
};
use sandkeep_testkit::fake::small;
use sandkeep_testkit::house::{name, project};

use super::runs::eventually;
use super::webhooks::{Receiver, house};

const BASE: &str = "https://keep.example.com/v1/approvals/";

/// A key that may approve.
async fn approver(engine: &Engine) -> KeyId {
    let made =
        engine.create_approver_key(&project(), "approver".to_owned(), Scope::Write, None).await;
    made.expect("a key").0.id
}

async fn add(engine: &Engine, receiver: &Receiver, by: Option<&KeyId>) -> WebhookId {
    let create = CreateWebhook {
        url: receiver.url(),
        events: vec!["approval.*".to_owned()],
        allow_private: true,
        answers: by.cloned(),
        ..CreateWebhook::default()
    };
    engine.create_webhook(&project(), create).await.expect("a webhook").0.webhook.id
}

async fn ask(engine: &Engine, by: &KeyId, expires: Option<Span>) -> Approval {
    let caller = Caller {
        project: project(),
        scope: Scope::Write,
        key: by.clone(),
        approve: false,
        until: None,
    };
    let request = AskRequest { question: "deploy?".to_owned(), expires, ..AskRequest::default() };
    engine.ask_approval(&caller, &name("app"), request).await.expect("it is asked")
}

/// The token of the link that the receiver got for an approval.
async fn token(receiver: &Receiver, approval: &Approval) -> String {
    let event = eventually!("the question is delivered", {
        let all = receiver.all().into_iter();
        let events = all.map(|one| serde_json::from_str::<serde_json::Value>(&one.body).unwrap());
        let mut asked = events.filter(|one| one["kind"] == "approval.asked");
        asked.find(|one| one["data"]["approval"] == approval.id.as_str())
    });
    let url = event["data"]["answer_url"].as_str().unwrap_or_else(|| panic!("no link: {event}"));
    let rest = url.strip_prefix(BASE).expect("the address of the settings");
    let (id, token) = rest.split_once("/answer?token=").expect("a token");
    assert_eq!(id, approval.id.as_str());
    token.to_owned()
}

async fn answer(engine: &Engine, token: &str, id: &ApprovalId) -> Result<Approval, String> {
    let answered =
        engine.answer_by_link(token, id, ApprovalAnswer::Approve, "by a link".to_owned()).await;
    answered.map_err(|error| error.code().to_owned())
}

#[tokio::test]
async fn a_link_answers_one_approval_once() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let (asker, key) = (KeyId::fresh(), approver(&engine).await);
    let id = add(&engine, &receiver, Some(&key)).await;
    let (one, other) = (ask(&engine, &asker, None).await, ask(&engine, &asker, None).await);
    let (first, second) = (token(&receiver, &one).await, token(&receiver, &other).await);
    assert_ne!(first, second);
    // Of two answers at the same time one counts.
    let deny = engine.answer_by_link(&first, &one.id, ApprovalAnswer::Deny, String::new());
    let (approved, denied) = tokio::join!(answer(&engine, &first, &one.id), deny);
    let denied = denied.map_err(|error| error.code().to_owned());
    let winner = match (&approved, &denied) {
        (Ok(won), Err(lost)) | (Err(lost), Ok(won)) if lost == "already_answered" => won,
        both => panic!("{both:?}"),
    };
    assert_eq!(winner.answered_by, Some(Answerer::Webhook(id.clone())));
    assert_eq!(engine.approval(&project(), &one.id).unwrap(), *winner);
    assert_eq!(answer(&engine, &first, &one.id).await.unwrap_err(), "already_answered", "a replay");
    // It is a link to one approval, and every character of it counts.
    assert_eq!(answer(&engine, &first, &other.id).await.unwrap_err(), "answer_link_not_valid");
    let (webhook, mac) = second.split_once('.').unwrap();
    let flipped = if mac.starts_with('A') { "B" } else { "A" };
    let foreign = WebhookId::fresh();
    for bad in [
        String::new(),
        ".".to_owned(),
        webhook.to_owned(),
        format!("{webhook}."),
        format!("{webhook}.{flipped}{}", &mac[1..]),
        format!("{webhook}.{}", &mac[..mac.len() - 2]),
        format!("{webhook}.{mac}AA"),
        format!("{foreign}.{mac}"),
        "x".repeat(100_000),
    ] {
        let refused = answer(&engine, &bad, &other.id).await;
        assert_eq!(refused.unwrap_err(), "answer_link_not_valid", "{bad:.100}");
    }
    assert!(engine.approval(&project(), &other.id).unwrap().is_pending());
    let answered = answer(&engine, &second, &other.id).await.expect("the right one");
    assert_eq!(
        (answered.status, answered.comment.as_str()),
        (ApprovalStatus::Approved, "by a link")
    );
    // What a link answered reads back after a restart.
    engine.shutdown().await;
    drop(engine);
    let engine = house.open().await;
    let kept = engine.approval(&project(), &other.id).unwrap();
    assert_eq!(kept.answered_by, Some(Answerer::Webhook(id)));
    house.end(engine).await;
}

#[tokio::test]
async fn a_link_ends_with_its_approval_its_webhook_and_its_key() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let (asker, key) = (KeyId::fresh(), approver(&engine).await);
    let id = add(&engine, &receiver, Some(&key)).await;
    let refused = async |token: &str, approval: &Approval, code: &str, why: &str| {
        assert_eq!(answer(&engine, token, &approval.id).await.unwrap_err(), code, "{why}");
    };
    let short = ask(&engine, &asker, Some(Span(1000))).await;
    let link = token(&receiver, &short).await;
    eventually!("it expires", {
        let now = engine.approval(&project(), &short.id).unwrap();
        (now.status == ApprovalStatus::Expired).then_some(())
    });
    refused(&link, &short, "already_answered", "expired").await;
    let asked = ask(&engine, &asker, None).await;
    let link = token(&receiver, &asked).await;
    let update = async |change: UpdateWebhook| {
        let approver = Some(key.clone());
        let change = UpdateWebhook { approver, may_allow_private: true, ..change };
        engine.update_webhook(&project(), &id, change).await.expect("it is changed");
    };
    update(UpdateWebhook { enabled: Some(false), ..UpdateWebhook::default() }).await;
    refused(&link, &asked, "answer_link_not_valid", "disabled").await;
    update(UpdateWebhook { enabled: Some(true), ..UpdateWebhook::default() }).await;
    assert!(engine.answer_link(&link, &asked.id).is_ok());
    // Another address gets links of its own, and so does a webhook that may answer again.
    update(UpdateWebhook {
        url: Some(format!("{}&n=2", receiver.url())),
        ..UpdateWebhook::default()
    })
    .await;
    refused(&link, &asked, "answer_link_not_valid", "another address").await;
    let asked = ask(&engine, &asker, None).await;
    let link = token(&receiver, &asked).await;
    update(UpdateWebhook { answers: Some(false), ..UpdateWebhook::default() }).await;
    refused(&link, &asked, "answer_link_not_valid", "no answers").await;
    update(UpdateWebhook { answers: Some(true), ..UpdateWebhook::default() }).await;
    refused(&link, &asked, "answer_link_not_valid", "answers again").await;
    let asked = ask(&engine, &asker, None).await;
    let link = token(&receiver, &asked).await;
    let other = approver(&engine).await;
    engine.revoke_key(&project(), &key).await.unwrap();
    refused(&link, &asked, "answer_link_not_valid", "its key was revoked").await;
    let again = UpdateWebhook {
        answers: Some(true),
        approver: Some(other.clone()),
        ..UpdateWebhook::default()
    };
    engine.update_webhook(&project(), &id, again).await.expect("another key allows it");
    let asked = ask(&engine, &asker, None).await;
    let link = token(&receiver, &asked).await;
    // A project may want somebody else to answer: the key that allowed the webhook stands for it.
    let limits = ProjectRuns { separate_approver: true, ..ProjectRuns::default() };
    engine.set_project_runs(&project(), limits).await.unwrap();
    let own = ask(&engine, &other, None).await;
    let own_link = token(&receiver, &own).await;
    refused(&own_link, &own, "separate_approver", "the same key asked").await;
    engine.delete_webhook(&project(), &id).await.unwrap();
    refused(&link, &asked, "answer_link_not_valid", "deleted").await;
    assert!(engine.approval(&project(), &asked.id).unwrap().is_pending());
    house.end(engine).await;
}

#[tokio::test]
async fn a_daemon_that_is_killed_after_the_delivery_takes_the_answer_as_the_next_one() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open_apart().await;
    let url = receiver.url();
    let asked = engine
        .run(|engine| async move {
            engine.create(&project(), small("app"), None).await.unwrap();
            let key = approver(&engine).await;
            let create = CreateWebhook {
                url,
                events: vec!["approval.asked".to_owned()],
                allow_private: true,
                answers: Some(key),
                ..CreateWebhook::default()
            };
            engine.create_webhook(&project(), create).await.unwrap();
            ask(&engine, &KeyId::fresh(), None).await
        })
        .await;
    let link = token(&receiver, &asked).await;
    engine.kill();
    let engine = house.open().await;
    let answered = answer(&engine, &link, &asked.id).await.expect("the link still works");
    assert_eq!(answered.status, ApprovalStatus::Approved);
    assert_eq!(answer(&engine, &link, &asked.id).await.unwrap_err(), "already_answered");
    house.end(engine).await;
}

#[tokio::test]
async fn only_a_key_that_may_approve_lets_a_webhook_answer() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let (asker, key) = (KeyId::fresh(), approver(&engine).await);
    let plain = add(&engine, &receiver, None).await;
    ask(&engine, &asker, None).await;
    let sent = receiver.wait(1).await.remove(0);
    assert!(!sent.body.contains("answer_url"), "nobody asked for a link: {}", sent.body);
    let allow =
        |approver| UpdateWebhook { answers: Some(true), approver, ..UpdateWebhook::default() };
    let refused = engine.update_webhook(&project(), &plain, allow(None)).await.unwrap_err();
    assert_eq!(refused.code(), "forbidden");
    engine.update_webhook(&project(), &plain, allow(Some(key.clone()))).await.unwrap();
    // Who gets the links is up to those who may approve.
    let elsewhere = UpdateWebhook {
        url: Some("https://elsewhere.example.com/".to_owned()),
        may_allow_private: true,
        ..UpdateWebhook::default()
    };
    let refused = engine.update_webhook(&project(), &plain, elsewhere).await.unwrap_err();
    assert_eq!(refused.code(), "forbidden");
    // Links do not travel in the open.
    let open = CreateWebhook {
        url: "http://hooks.example.com/".to_owned(),
        events: vec!["approval.asked".to_owned()],
        answers: Some(key),
        ..CreateWebhook::default()
    };
    let refused = engine.create_webhook(&project(), open).await.unwrap_err();
    assert_eq!(refused.code(), "invalid");
    assert!(refused.to_string().contains("https://"), "{refused}");
    house.end(engine).await;
}
