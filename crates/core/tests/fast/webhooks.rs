//! Webhooks against real receivers on loopback.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use parking_lot::Mutex;
use sandkeep_core::engine::{
    CreateWebhook, Engine, ErrorKind, UpdateWebhook, WebhookSettings, WebhookStatus,
};
use sandkeep_core::model::{Patch, Tags, WebhookId};
use sandkeep_testkit::fake::{FakeHouse, small};
use sandkeep_testkit::house::{name, project};
use sha2::Sha256;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const SECRET: &str = "a secret of sixteen bytes or more";

/// A request that a receiver got.
#[derive(Debug, Clone)]
pub(super) struct Received {
    headers: BTreeMap<String, String>,
    pub(super) body: String,
}

impl Received {
    pub(super) fn kind(&self) -> &str {
        &self.headers["sandkeep-event"]
    }

    fn sandbox(&self) -> String {
        let event: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        event["sandbox"]["name"].as_str().unwrap_or_default().to_owned()
    }

    fn id(&self) -> u64 {
        let event: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        event["id"].as_str().unwrap().parse().unwrap()
    }
}

type Answer = dyn Fn(&Received) -> Option<String> + Send + Sync;

/// An HTTP server that answers as a test wants; `None` is no answer at all.
pub(super) struct Receiver {
    address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
    answer: Arc<Mutex<Arc<Answer>>>,
}

impl Receiver {
    pub(super) async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Mutex::new(Vec::new()));
        let answer: Arc<Answer> = Arc::new(|_| Some(status(204)));
        let answer = Arc::new(Mutex::new(answer));
        let (all, how) = (Arc::clone(&received), Arc::clone(&answer));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&all), Arc::clone(&how)));
            }
        });
        Self { address, received, answer }
    }

    fn answers(&self, answer: impl Fn(&Received) -> Option<String> + Send + Sync + 'static) {
        *self.answer.lock() = Arc::new(answer);
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/hook?token=1", self.address)
    }

    pub(super) fn all(&self) -> Vec<Received> {
        self.received.lock().clone()
    }

    /// Waits until so many requests came.
    pub(super) async fn wait(&self, count: usize) -> Vec<Received> {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) {
            if self.received.lock().len() >= count {
                return self.all();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{count} requests did not come: {:#?}", self.all());
    }

    /// Waits for a request of this kind. Others may come twice.
    async fn wait_for(&self, kind: &str) -> Received {
        for count in 1.. {
            let found = self.wait(count).await.into_iter().find(|one| one.kind() == kind);
            if let Some(found) = found {
                return found;
            }
        }
        unreachable!("`wait` ends")
    }
}

fn status(status: u16) -> String {
    format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n")
}

async fn serve(
    mut stream: TcpStream,
    all: Arc<Mutex<Vec<Received>>>,
    how: Arc<Mutex<Arc<Answer>>>,
) {
    let (mut bytes, mut piece) = (Vec::new(), [0u8; 4096]);
    let received = loop {
        let Ok(length @ 1..) = stream.read(&mut piece).await else { return };
        bytes.extend_from_slice(&piece[..length]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let headers: BTreeMap<String, String> = head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        if body.len() >= headers["content-length"].parse::<usize>().unwrap() {
            break Received { headers, body: body.to_owned() };
        }
    };
    let answer = how.lock().clone();
    let answer = answer(&received);
    all.lock().push(received);
    match answer {
        Some(answer) => drop(stream.write_all(answer.as_bytes()).await),
        None => tokio::time::sleep(Duration::from_secs(3600)).await,
    }
}

/// A house whose webhooks are impatient.
pub(super) fn house() -> FakeHouse {
    let mut house = FakeHouse::new();
    house.settings.webhooks = WebhookSettings {
        timeout: Duration::from_millis(500),
        retry: Duration::from_millis(50),
        retry_at_latest: Duration::from_millis(200),
        give_up: Duration::from_secs(3600),
        public_url: Some("https://keep.example.com/".to_owned()),
    };
    house
}

async fn add(engine: &Engine, receiver: &Receiver, events: &[&str]) -> WebhookId {
    let create = CreateWebhook {
        url: receiver.url(),
        events: events.iter().map(|one| (*one).to_owned()).collect(),
        secret: Some(SECRET.to_owned()),
        allow_private: true,
        ..CreateWebhook::default()
    };
    let (made, secret) = engine.create_webhook(&project(), create).await.unwrap();
    assert_eq!(*secret, SECRET);
    made.webhook.id
}

async fn until(engine: &Engine, id: &WebhookId, fits: impl Fn(&WebhookStatus) -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        if fits(&engine.webhook(&project(), id).unwrap()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not come about: {:#?}", engine.webhook(&project(), id));
}

/// Changes a sandbox, which is one event.
async fn touch(engine: &Engine, sandbox: &str, value: usize) {
    let tags = Tags::from([("n".to_owned(), value.to_string())]);
    let patch = Patch { tags: Some(tags), ..Patch::default() };
    engine.update(&project(), &name(sandbox), patch).await.unwrap();
}

fn signed(secret: &str, received: &Received) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    mac.update(format!("{}.{}", received.headers["sandkeep-timestamp"], received.body).as_bytes());
    format!("v1={}", hex::encode(mac.finalize().into_bytes()))
}

#[tokio::test]
async fn events_arrive_signed_and_only_those_that_were_asked_for() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open().await;
    let id = add(&engine, &receiver, &["sandbox.updated", "sandbox.deleted"]).await;
    engine.create(&project(), small("app"), None).await.unwrap();
    touch(&engine, "app", 1).await;
    let first = receiver.wait(1).await.remove(0);
    assert_eq!((first.kind(), first.sandbox().as_str()), ("sandbox.updated", "app"));
    assert_eq!(first.headers["sandkeep-signature"], signed(SECRET, &first));
    assert_eq!(first.headers["sandkeep-delivery"], format!("{id}/{}", first.id()));
    assert_eq!(first.headers["content-type"], "application/json");
    let now = jiff::Timestamp::now().as_second();
    let sent: i64 = first.headers["sandkeep-timestamp"].parse().unwrap();
    assert!((now - 30..=now).contains(&sent), "{sent}");
    // During a rotation both secrets sign.
    let (_, fresh) = engine.rotate_webhook(&project(), &id, None, false).await.unwrap();
    touch(&engine, "app", 2).await;
    let second = receiver.wait(2).await.remove(1);
    let both = format!("{}, {}", signed(&fresh, &second), signed(SECRET, &second));
    assert_eq!(second.headers["sandkeep-signature"], both);
    engine.rotate_webhook(&project(), &id, Some(SECRET.to_owned()), true).await.unwrap();
    let tested = engine.test_webhook(&project(), &id).await.unwrap();
    assert_eq!((tested.status, tested.error), (Some(204), None));
    let third = receiver.wait_for("webhook.test").await;
    assert_eq!(third.headers["sandkeep-signature"], signed(SECRET, &third));
    // Neither the secret nor what it is sealed from is on disk as it is.
    let stored =
        std::fs::read_to_string(house.data().join(format!("webhooks/default/{id}/webhook.json")));
    assert!(!stored.unwrap().contains(SECRET));
    engine.delete_webhook(&project(), &id).await.unwrap();
    let before = receiver.all().len();
    touch(&engine, "app", 3).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(receiver.all().len(), before);
    house.end(engine).await;
}

#[tokio::test]
async fn a_sandbox_keeps_its_order_and_holds_up_no_other() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open().await;
    for sandbox in ["slow", "fast"] {
        engine.create(&project(), small(sandbox), None).await.unwrap();
    }
    let id = add(&engine, &receiver, &["sandbox.updated"]).await;
    let refuses = Arc::new(Mutex::new(true));
    let still = Arc::clone(&refuses);
    receiver.answers(move |received| {
        let refused = received.sandbox() == "slow" && *still.lock();
        Some(status(if refused { 500 } else { 200 }))
    });
    for number in 0..5 {
        touch(&engine, "slow", number).await;
        touch(&engine, "fast", number).await;
    }
    let begun = Instant::now();
    let of = |sandbox: &str| -> Vec<u64> {
        let all = receiver.all().into_iter().filter(|one| one.sandbox() == sandbox);
        all.map(|one| one.id()).collect()
    };
    while of("fast").len() < 5 || of("slow").len() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?} {:?}", of("fast"), of("slow"));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(of("slow").windows(2).all(|pair| pair[0] == pair[1]), "one is tried again and again");
    until(&engine, &id, |found| found.failing_since.is_some()).await;
    *refuses.lock() = false;
    until(&engine, &id, |found| found.failing_since.is_none()).await;
    while of("slow").iter().collect::<std::collections::BTreeSet<_>>().len() < 5 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", of("slow"));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for sandbox in ["slow", "fast"] {
        let ids = of(sandbox);
        assert!(ids.windows(2).all(|pair| pair[0] <= pair[1]), "{sandbox}: {ids:?}");
    }
    house.end(engine).await;
}

#[tokio::test]
async fn a_restart_in_the_middle_of_a_backlog_loses_nothing() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open_apart().await;
    let url = receiver.url();
    let id = engine
        .run(|engine| async move {
            engine.create(&project(), small("app"), None).await.unwrap();
            let create = CreateWebhook {
                url,
                events: vec!["sandbox.updated".to_owned()],
                secret: Some(SECRET.to_owned()),
                allow_private: true,
                ..CreateWebhook::default()
            };
            engine.create_webhook(&project(), create).await.unwrap().0.webhook.id
        })
        .await;
    // It takes three and refuses what follows.
    let count = Arc::new(Mutex::new(0));
    let taken = Arc::clone(&count);
    receiver.answers(move |_| {
        let mut taken = taken.lock();
        *taken += 1;
        Some(status(if *taken <= 3 { 200 } else { 503 }))
    });
    engine
        .run(|engine| async move {
            for number in 0..10 {
                touch(&engine, "app", number).await;
            }
        })
        .await;
    receiver.wait(5).await;
    // What was taken is on record by then.
    tokio::time::sleep(Duration::from_millis(600)).await;
    engine.kill();
    let before = receiver.all();
    let taken: Vec<u64> = before[..3].iter().map(Received::id).collect();
    receiver.received.lock().clear();
    receiver.answers(|_| Some(status(200)));
    let engine = house.open().await;
    let after: Vec<u64> = receiver.wait(7).await.iter().map(Received::id).collect();
    assert!(after.iter().all(|id| !taken.contains(id)), "{taken:?} {after:?}");
    assert!(after.windows(2).all(|pair| pair[0] < pair[1]), "{after:?}");
    assert_eq!(after.len(), 7);
    // One that happens while it is disabled is delivered when it is enabled.
    let disable = |enabled| UpdateWebhook { enabled: Some(enabled), ..UpdateWebhook::default() };
    engine.update_webhook(&project(), &id, disable(false)).await.unwrap();
    touch(&engine, "app", 77).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(receiver.all().len(), 7);
    engine.update_webhook(&project(), &id, disable(true)).await.unwrap();
    receiver.wait(8).await;
    house.end(engine).await;
}

#[tokio::test]
async fn receivers_that_hang_redirect_or_are_gone() {
    let mut house = house();
    house.settings.webhooks.give_up = Duration::from_secs(2);
    let (hanging, redirecting, gone) =
        (Receiver::new().await, Receiver::new().await, Receiver::new().await);
    let elsewhere = Receiver::new().await;
    hanging.answers(|_| None);
    let to = elsewhere.url();
    redirecting.answers(move |_| {
        Some(format!("HTTP/1.1 307 X\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n"))
    });
    gone.answers(|_| Some(status(410)));
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let mut ids = Vec::new();
    for receiver in [&hanging, &redirecting, &gone] {
        ids.push(add(&engine, receiver, &["sandbox.updated"]).await);
    }
    let told = Receiver::new().await;
    add(&engine, &told, &["webhook.disabled"]).await;
    touch(&engine, "app", 1).await;
    for (id, reason) in ids.iter().zip(["no answer within", "redirects are not followed", "410"]) {
        until(&engine, id, |found| {
            let disabled = found.webhook.disabled.as_ref();
            disabled.is_some_and(|disabled| disabled.reason.contains(reason))
        })
        .await;
    }
    assert!(elsewhere.all().is_empty(), "a redirect was followed");
    assert_eq!(gone.all().len(), 1, "one that is gone is not asked again");
    let events = told.wait(3).await;
    assert!(events.iter().all(|event| event.kind() == "webhook.disabled"));
    let found = engine.webhook(&project(), &ids[0]).unwrap();
    assert!(found.deliveries.len() > 1 && found.deliveries.len() <= 20, "{found:?}");
    house.end(engine).await;
}

#[tokio::test]
async fn an_address_inside_is_refused_unless_it_is_allowed() {
    let (house, receiver) = (house(), Receiver::new().await);
    let engine = house.open().await;
    let create = |url: &str| CreateWebhook {
        url: url.to_owned(),
        events: vec!["*".to_owned()],
        ..CreateWebhook::default()
    };
    let url = receiver.url();
    let (made, secret) = engine.create_webhook(&project(), create(&url)).await.unwrap();
    assert!(secret.starts_with("whsec_") && secret.len() > 40);
    let tested = engine.test_webhook(&project(), &made.webhook.id).await.unwrap();
    assert!(tested.error.unwrap().contains("loopback"));
    engine.create(&project(), small("app"), None).await.unwrap();
    until(&engine, &made.webhook.id, |found| found.failing_since.is_some()).await;
    assert!(receiver.all().is_empty());
    for url in ["", "ftp://x", "https://u:p@x", "https://x/#y"] {
        let refused = engine.create_webhook(&project(), create(url)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{url}: {refused}");
    }
    for (events, secret) in
        [(vec![], None), (vec!["nothing".to_owned()], None), (vec!["*".to_owned()], Some("short"))]
    {
        let secret = secret.map(str::to_owned);
        let create = CreateWebhook { events, secret, ..create("https://example.com") };
        let refused = engine.create_webhook(&project(), create).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    }
    for _ in 1..20 {
        let disabled = create("https://receiver.invalid/");
        engine.create_webhook(&project(), disabled).await.unwrap();
    }
    let refused = engine.create_webhook(&project(), create("https://example.com")).await;
    assert!(refused.unwrap_err().to_string().contains("at most 20"));
    house.end(engine).await;
}
