use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
use hickory_proto::rr::rdata::{CNAME, TXT};
use hickory_proto::rr::{Name, RData, RecordType};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{ADDRESSES, NameServer, REMEMBERED};
use crate::net::log::Refusals;
use crate::net::rules::ActiveRules;
use crate::net::testing::{self, FakeNameServer, Notes, answer};
use crate::net::upstream::Upstream;

struct World {
    names: Arc<NameServer>,
    rules: Arc<ActiveRules>,
    notes: Arc<Notes>,
}

fn world(upstream: Arc<Upstream>, policy: &str) -> World {
    let (log, notes) = testing::connection_log();
    let rules = Arc::new(ActiveRules::new(testing::rules(policy)));
    let names =
        NameServer::new(upstream, Arc::clone(&rules), Refusals::new(log), testing::open_gate());
    World { names: Arc::new(names), rules, notes }
}

pub(in crate::net) fn question(name: &str, kind: RecordType, edns: bool) -> Vec<u8> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    if edns {
        let mut edns = Edns::new();
        edns.set_max_payload(1232);
        message.set_edns(edns);
    }
    message.to_vec().unwrap()
}

impl World {
    async fn ask(&self, name: &str, kind: RecordType) -> Message {
        let asked = question(name, kind, true);
        let answer = self.names.datagram(&asked).await.expect("no answer");
        assert_eq!(answer[..2], asked[..2], "the number is another");
        Message::from_vec(&answer).unwrap()
    }

    async fn addresses(&self, name: &str, kind: RecordType) -> Vec<String> {
        addresses(&self.ask(name, kind).await)
    }
}

pub(in crate::net) fn addresses(message: &Message) -> Vec<String> {
    let text = |data: &RData| match data {
        RData::A(ip) => Some(ip.to_string()),
        RData::AAAA(ip) => Some(ip.to_string()),
        _ => None,
    };
    message.answers.iter().filter_map(|record| text(&record.data)).collect()
}

fn a(ip: &str) -> RData {
    super::address(ip.parse::<IpAddr>().unwrap())
}

fn because(message: &Message) -> Option<String> {
    match message.edns.as_ref()?.option(EdnsCode::Unknown(15))? {
        EdnsOption::Unknown(_, body) => Some(String::from_utf8_lossy(&body[2..]).into_owned()),
        _ => None,
    }
}

#[tokio::test]
async fn an_allowed_name_is_answered_and_pinned_under_the_asked_name() {
    let server = FakeNameServer::start(|question| {
        let records = match question.queries[0].query_type() {
            RecordType::A => vec![
                ("www.a.example.", 9000, RData::CNAME(CNAME("cdn.far.test.".parse().unwrap()))),
                ("cdn.far.test.", 9000, a("198.51.100.1")),
                // Records that were not asked for.
                ("other.test.", 9000, a("198.51.100.66")),
            ],
            RecordType::AAAA => vec![("www.a.example.", 5, a("2001:db8::1"))],
            _ => vec![("www.a.example.", 5, RData::TXT(TXT::new(vec!["hello".to_owned()])))],
        };
        answer(question, records).to_vec().ok()
    })
    .await;
    let outside = testing::upstream(&[], &[], Some(server.at));
    let world = world(outside, r#"{"mode": "custom", "domains": ["*.a.example"]}"#);
    let said = world.ask("WWW.a.example.", RecordType::A).await;
    assert_eq!(addresses(&said), ["198.51.100.1"]);
    assert_eq!(said.answers.len(), 2, "the alias is told too");
    assert!(said.answers.iter().all(|record| record.ttl <= REMEMBERED), "{said:?}");
    assert_eq!(world.addresses("www.a.example.", RecordType::AAAA).await, ["2001:db8::1"]);
    let ip: IpAddr = "198.51.100.1".parse().unwrap();
    assert_eq!(world.names.of(ip), ["www.a.example"]);
    assert!(world.names.gave(ip, "www.a.example").await);
    assert!(world.names.of("198.51.100.66".parse().unwrap()).is_empty());
    assert_eq!(world.ask("www.a.example.", RecordType::TXT).await.answers.len(), 1);
    let asked = server.asked.lock().unwrap().len();
    world.ask("www.a.example.", RecordType::A).await;
    assert_eq!(server.asked.lock().unwrap().len(), asked, "the answer is remembered");
    assert!(world.notes.all().is_empty(), "{:?}", world.notes.lines());
}

#[tokio::test]
async fn a_refused_name_does_not_exist_and_nobody_is_asked() {
    let server = FakeNameServer::start(|question| {
        answer(question, vec![("evil.example.", 60, a("198.51.100.1"))]).to_vec().ok()
    })
    .await;
    let outside = testing::upstream(&[], &[], Some(server.at));
    let world = world(outside, r#"{"mode": "custom", "domains": ["a.example"]}"#);
    for _ in 0..20 {
        let said = world.ask("evil.example.", RecordType::A).await;
        assert_eq!(said.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(because(&said).as_deref(), Some("no rule allows it"));
    }
    world.rules.set(testing::rules(r#"{"mode": "deny-all"}"#));
    for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::PTR] {
        let said = world.ask("a.example.", kind).await;
        assert_eq!(said.metadata.response_code, ResponseCode::NXDomain);
    }
    assert_eq!(world.addresses("localhost.", RecordType::A).await, ["127.0.0.1"]);
    assert!(server.asked.lock().unwrap().is_empty());
    // Repeats are reported once, and their number once more.
    let told = ["Denied evil.example no rule allows it", "Denied a.example deny-all"];
    assert_eq!(world.notes.lines(), told);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let details: Vec<_> = world.notes.all().into_iter().filter_map(|note| note.detail).collect();
    assert!(details.contains(&"19 more within a second".to_owned()), "{details:?}");
}

#[tokio::test]
async fn names_never_lead_inside_unless_the_operator_says_so() {
    let server = FakeNameServer::start(|question| {
        let name = question.queries[0].name().to_string();
        let ip = match name.as_str() {
            "ten.test." => "10.0.0.1",
            "loop.test." => "127.0.0.1",
            "opened.test." => "127.0.7.7",
            "meta.test." => "169.254.169.254",
            "shared.test." => "100.64.1.1",
            _ => {
                return answer(
                    question,
                    vec![
                        ("mixed.test.", 60, a("192.168.1.1")),
                        ("mixed.test.", 60, a("203.0.113.1")),
                    ],
                )
                .to_vec()
                .ok();
            }
        };
        answer(question, vec![(&name, 60, a(ip))]).to_vec().ok()
    })
    .await;
    let hosts: &[(&str, &[&str])] =
        &[("git.internal", &["127.0.7.7", "10.1.1.1", "169.254.169.254"])];
    let outside = testing::upstream(&["127.0.7.7:8080"], hosts, Some(server.at));
    let world = world(outside, r#"{"mode": "allow-all"}"#);
    for name in ["ten.test.", "loop.test.", "meta.test.", "shared.test."] {
        let said = world.ask(name, RecordType::A).await;
        assert!(said.answers.is_empty(), "{name}: {said:?}");
        assert_eq!(said.metadata.response_code, ResponseCode::NoError);
        assert!(because(&said).is_some_and(|why| why.contains("private")), "{name}");
    }
    assert_eq!(world.notes.all().len(), 4);
    assert_eq!(world.addresses("mixed.test.", RecordType::A).await, ["203.0.113.1"]);
    assert_eq!(world.addresses("opened.test.", RecordType::A).await, ["100.97.7.7"]);
    assert_eq!(world.addresses("git.internal.", RecordType::A).await, ["100.97.7.7", "10.1.1.1"]);
    let host = world.addresses("host.sandkeep.internal.", RecordType::A).await;
    assert_eq!(host, ["100.97.0.1"]);
    assert!(world.names.gave("100.97.7.7".parse().unwrap(), "git.internal").await);
}

#[tokio::test]
async fn what_would_hide_a_name_is_not_answered() {
    let server = FakeNameServer::start(|question| answer(question, vec![]).to_vec().ok()).await;
    let outside = testing::upstream(&[], &[], Some(server.at));
    let world = world(outside, r#"{"mode": "allow-all"}"#);
    for kind in [RecordType::HTTPS, RecordType::SVCB] {
        let said = world.ask("a.example.", kind).await;
        assert_eq!(said.metadata.response_code, ResponseCode::NoError);
        assert!(said.answers.is_empty());
    }
    assert_eq!(
        world.ask("a.example.", RecordType::AXFR).await.metadata.response_code,
        ResponseCode::Refused
    );
    assert!(server.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_large_answer_is_cut_short_by_datagram_and_whole_by_stream() {
    let server = FakeNameServer::start(|question| {
        let ips: Vec<_> = (0..200).map(|n| format!("198.51.100.{n}")).collect();
        let records = ips.iter().map(|ip| ("many.test.", 60, a(ip))).collect();
        answer(question, records).to_vec().ok()
    })
    .await;
    let outside = testing::upstream(&[], &[], Some(server.at));
    let world = world(outside, r#"{"mode": "allow-all"}"#);
    let plain = question("many.test.", RecordType::A, false);
    let short = world.names.datagram(&plain).await.unwrap();
    assert!(short.len() <= 512, "{} bytes", short.len());
    let short = Message::from_vec(&short).unwrap();
    assert!(short.metadata.truncation && short.edns.is_none());

    let (mut guest, served) = tokio::io::duplex(1 << 16);
    let names = Arc::clone(&world.names);
    let serving = tokio::spawn(async move { names.stream(served).await });
    for _ in 0..3 {
        guest.write_u16(u16::try_from(plain.len()).unwrap()).await.unwrap();
        guest.write_all(&plain).await.unwrap();
        let mut whole = vec![0; guest.read_u16().await.unwrap().into()];
        guest.read_exact(&mut whole).await.unwrap();
        let whole = Message::from_vec(&whole).unwrap();
        assert!(!whole.metadata.truncation);
        assert_eq!(whole.answers.len(), ADDRESSES);
    }
    // A question of 60000 bytes is none, and a connection that ends in the middle of one is over.
    guest.write_u16(60_000).await.unwrap();
    assert_eq!(guest.read(&mut [0; 8]).await.unwrap(), 0);
    serving.await.unwrap();
}

#[tokio::test]
async fn a_server_that_lies_harms_nobody_else() {
    let server = FakeNameServer::start(|question| {
        let name = question.queries[0].name().to_string();
        let good = answer(question, vec![(&name, 60, a("198.51.100.1"))]);
        match name.as_str() {
            "good.test." => good.to_vec().ok(),
            "silent.test." => None,
            "garbage.test." => Some(vec![0xff; 300]),
            "number.test." => {
                let mut other = good;
                other.metadata.id = other.metadata.id.wrapping_add(1);
                other.to_vec().ok()
            }
            "question.test." => {
                let mut other = answer(question, vec![("good.test.", 60, a("198.51.100.66"))]);
                other.queries[0] = Query::query("good.test.".parse().unwrap(), RecordType::A);
                other.to_vec().ok()
            }
            "loop.test." => {
                let alias = RData::CNAME(CNAME("loop.test.".parse().unwrap()));
                answer(question, vec![("loop.test.", 60, alias)]).to_vec().ok()
            }
            // A name that points at itself, in the middle of an answer.
            _ => {
                let mut bytes = good.to_vec().ok()?;
                let at = bytes.windows(2).rposition(|pair| pair == [0xc0, 0x0c])?;
                bytes[at + 1] = u8::try_from(at).ok()?;
                Some(bytes)
            }
        }
    })
    .await;
    let outside = testing::upstream(&[], &[], Some(server.at));
    let world = Arc::new(world(outside, r#"{"mode": "allow-all"}"#));
    let lies = ["silent", "garbage", "number", "question", "loop", "pointer"];
    let mut asking = tokio::task::JoinSet::new();
    for name in lies {
        let world = Arc::clone(&world);
        asking.spawn(async move { world.ask(&format!("{name}.test."), RecordType::A).await });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = Instant::now();
    assert_eq!(world.addresses("good.test.", RecordType::A).await, ["198.51.100.1"]);
    assert!(before.elapsed() < Duration::from_secs(2), "others were waited for");
    while let Some(said) = asking.join_next().await {
        assert!(addresses(&said.unwrap()).is_empty());
    }
    assert!(world.names.of("198.51.100.66".parse().unwrap()).is_empty());
}

#[tokio::test]
async fn what_is_no_question_gets_what_it_deserves() {
    let world = world(testing::upstream(&[], &[], None), r#"{"mode": "allow-all"}"#);
    let code = async |bytes: &[u8]| {
        let answer = world.names.datagram(bytes).await?;
        Some(Message::from_vec(&answer).unwrap().metadata.response_code)
    };
    assert_eq!(code(&[]).await, None);
    assert_eq!(code(&[1, 2, 3]).await, None);
    assert_eq!(code(&[0xff; 12]).await, None, "an answer is not answered");
    assert_eq!(code(&[0, 1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0]).await, Some(ResponseCode::FormErr));
    let mut two = Message::query();
    for _ in 0..2 {
        two.add_query(Query::query("a.example.".parse().unwrap(), RecordType::A));
    }
    assert_eq!(code(&two.to_vec().unwrap()).await, Some(ResponseCode::FormErr));
    let mut update = Message::query();
    update.metadata.op_code = OpCode::Notify;
    assert_eq!(code(&update.to_vec().unwrap()).await, Some(ResponseCode::NotImp));
    let root = question(".", RecordType::NS, false);
    assert_eq!(code(&root).await, Some(ResponseCode::NXDomain));
    // A label may hold a dot: `a.example` in one is not `a` under `example`.
    let dotted = Name::from_labels([&b"a.example"[..]]).unwrap();
    let mut message = Message::query();
    message.add_query(Query::query(dotted, RecordType::A));
    assert_eq!(code(&message.to_vec().unwrap()).await, Some(ResponseCode::NXDomain));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_may_be_asked(
        noise in prop::collection::vec(any::<u8>(), 0..300),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        valid in any::<bool>()
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut bytes = if valid { question("a.example.", RecordType::A, true) } else { noise };
        for (at, byte) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        runtime.block_on(async {
            let world = world(testing::upstream(&[], &[], None), r#"{"mode": "deny-all"}"#);
            if let Some(answer) = world.names.datagram(&bytes).await {
                let answer = Message::from_vec(&answer).expect("an answer that cannot be read");
                assert!(answer.answers.is_empty());
            }
        });
    }
}
