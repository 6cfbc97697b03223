use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{
    Destination, Dispatcher, FlowHandler, GuestStream, OpenDecision, OpenFlow, UnnamedKind,
    fits_unnamed,
};
use crate::model::{Protocol, Verdict};
use crate::net::gate::Gate;
use crate::net::proxy::Authority;
use crate::net::sniff::tests::hello;
use crate::net::testing::{self, FakeNameServer, Notes};

impl GuestStream for DuplexStream {
    fn reset(self) {}

    async fn relay(mut self, mut outside: TcpStream, open: &Arc<OpenFlow>) -> io::Result<()> {
        tokio::select! {
            () = open.is_cut() => Ok(()),
            done = tokio::io::copy_bidirectional(&mut self, &mut outside) => done.map(drop),
        }
    }
}

/// A sandbox's network without its packets, and a server on the host's loopback that `a.test`, `b.test` and `git.test`
/// all lead to.
struct World {
    dispatcher: Arc<Dispatcher>,
    notes: Arc<Notes>,
    server: TcpListener,
    to: SocketAddr,
    /// Knows no name.
    _names: FakeNameServer,
}

async fn world(policy: &str) -> World {
    world_behind(testing::open_gate(), policy).await
}

async fn world_behind(gate: Arc<dyn Gate>, policy: &str) -> World {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let except = format!("127.0.0.1:{port}");
    let here: &[&str] = &["127.0.0.1"];
    let elsewhere: &[&str] = &["127.0.0.9"];
    let hosts = [("a.test", here), ("b.test", here), ("git.test", here), ("c.test", elsewhere)];
    let names = FakeNameServer::start(|question| {
        let mut none = testing::answer(question, vec![]);
        none.metadata.response_code = ResponseCode::NXDomain;
        none.to_vec().ok()
    })
    .await;
    let outside = testing::upstream(&[&except, "127.0.0.9:1"], &hosts, Some(names.at));
    let (log, notes) = testing::connection_log();
    let authority = Arc::new(Authority::generate("test").unwrap());
    let policy = policy.replace("PORT", &port.to_string());
    let dispatcher = Dispatcher::new(testing::rules(&policy), outside, authority, log, gate);
    World {
        dispatcher,
        notes,
        server,
        to: SocketAddr::from(([100, 97, 0, 1], port)),
        _names: names,
    }
}

impl World {
    /// A connection that the dispatcher accepted: the sandbox's end of it.
    fn connect(&self) -> DuplexStream {
        assert!(
            matches!(self.dispatcher.open(self.to), OpenDecision::Serve),
            "it is not looked at"
        );
        let (guest, ours) = tokio::io::duplex(1 << 16);
        tokio::spawn(Arc::clone(&self.dispatcher).carry(ours, self.to));
        guest
    }

    async fn accept(&self) -> TcpStream {
        timeout(Duration::from_secs(5), self.server.accept()).await.expect("nobody came").unwrap().0
    }

    /// Sends a line from inside; checks that the server gets it and the sandbox gets the answer.
    async fn passes(&self, first: &[u8]) -> (DuplexStream, TcpStream) {
        let mut guest = self.connect();
        guest.write_all(first).await.unwrap();
        let mut server = self.accept().await;
        let mut heard = vec![0; first.len()];
        timeout(Duration::from_secs(5), server.read_exact(&mut heard)).await.unwrap().unwrap();
        assert_eq!(heard, first);
        server.write_all(b"hi").await.unwrap();
        let mut answer = [0; 2];
        timeout(Duration::from_secs(5), guest.read_exact(&mut answer)).await.unwrap().unwrap();
        (guest, server)
    }

    /// Says something from inside, and sees the connection end without the server hearing of it.
    async fn refused(&self, first: &[u8]) {
        let mut guest = self.connect();
        guest.write_all(first).await.unwrap();
        ends(&mut guest).await;
        self.nobody_came().await;
    }

    async fn nobody_came(&self) {
        let came = timeout(Duration::from_millis(100), self.server.accept()).await;
        assert!(came.is_err(), "the server heard of it");
    }

    fn set(&self, policy: &str) {
        self.dispatcher
            .set_rules(testing::rules(&policy.replace("PORT", &self.to.port().to_string())));
    }
}

async fn ends(guest: &mut DuplexStream) {
    let read = timeout(Duration::from_secs(5), guest.read(&mut [0; 16])).await;
    assert_eq!(read.expect("it goes on").unwrap_or(0), 0);
}

const BY_NAME: &str = r#"{"mode": "custom", "domains": ["a.test", "git.test:PORT"]}"#;

#[tokio::test]
async fn an_address_is_reachable_for_the_name_that_allows_it_alone() {
    let world = world(BY_NAME).await;
    drop(world.passes(&hello("a.test")).await);
    let allowed = world.notes.wait_for(Verdict::Allowed).await;
    assert_eq!((allowed.name.as_deref(), allowed.rule.as_str()), (Some("a.test"), "domain a.test"));
    assert_eq!(allowed.to, Some(world.to));
    assert_eq!(allowed.bytes_out, hello("a.test").len() as u64);

    world.refused(&hello("b.test")).await;
    let denied = world.notes.wait_for(Verdict::Denied).await;
    assert_eq!(
        (denied.name.as_deref(), denied.rule.as_str()),
        (Some("b.test"), "no rule allows it")
    );
    world.refused(b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n").await;
    // No name where there should be one.
    world.refused(&hello("127.0.0.1")).await;
    world.refused(b"GET / HTTP/1.0\r\n\r\n").await;
    world.refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    // Allowed, but this is not where it is.
    world.set(r#"{"mode": "custom", "domains": ["c.test", "x.test"]}"#);
    world.refused(&hello("c.test")).await;
    world.refused(&hello("x.test")).await;
    let last = world.notes.lines().pop().unwrap();
    assert_eq!(last, "Denied x.test 100.97.0.1 was not given out for this name");
}

#[tokio::test]
async fn a_port_in_the_rule_lets_protocols_without_names_through() {
    let world = world(BY_NAME).await;
    // The name was not looked up yet: the address was not given out for it.
    world.refused(b"SSH-2.0-test\r\n").await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    drop(world.passes(b"SSH-2.0-test\r\n").await);
    let allowed = world.notes.wait_for(Verdict::Allowed).await;
    assert_eq!(allowed.name.as_deref(), Some("git.test"));
    assert!(allowed.rule.starts_with("domain git.test:"), "{}", allowed.rule);
    world.refused(&hello("b.test")).await;
}

#[tokio::test]
async fn a_server_may_speak_first() {
    let world = world(BY_NAME).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    let begun = Instant::now();
    let mut guest = world.connect();
    let mut server = world.accept().await;
    server.write_all(b"220 hello\r\n").await.unwrap();
    let mut heard = [0; 11];
    guest.read_exact(&mut heard).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    guest.write_all(b"QUIT\r\n").await.unwrap();
    let mut quit = [0; 6];
    server.read_exact(&mut quit).await.unwrap();
    server.write_all(b"221").await.unwrap();
    guest.read_exact(&mut [0; 3]).await.unwrap();
    drop((guest, server));
    let allowed = world.notes.wait_for(Verdict::Allowed).await;
    assert_eq!(allowed.name.as_deref(), Some("git.test"));
}

#[tokio::test]
async fn a_server_that_speaks_first_is_no_way_around_a_rule() {
    let world = world(BY_NAME).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    for said in [&b"PRI * HTTP/2.0\r\n\r\n"[..], b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n"] {
        let mut guest = world.connect();
        let mut server = world.accept().await;
        server.write_all(b"settings").await.unwrap();
        guest.read_exact(&mut [0; 8]).await.unwrap();
        guest.write_all(said).await.unwrap();
        ends(&mut guest).await;
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_or(0), 0, "the server heard it");
    }
}

#[tokio::test]
async fn odd_forms_of_http_and_tls_are_no_way_around_a_rule() {
    let world = world(BY_NAME).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    for said in [
        &b"DELETE  /x HTTP/1.1\r\nHost: b.test\r\n\r\n"[..],
        b"GET /admin\r\n",
        &[&[22, 3, 1, 0, 0], &hello("b.test")[..]].concat(),
        &[&[21, 3, 1, 0, 2, 1, 0], &hello("b.test")[..]].concat(),
    ] {
        world.refused(said).await;
    }
    let mut guest = world.connect();
    guest.write_all(b"DELETE /x HTTP/1.1\r\nHost: b.test\r\n").await.unwrap();
    guest.shutdown().await.unwrap();
    ends(&mut guest).await;
    world.nobody_came().await;
}

#[test]
fn where_http_is_at_home_judged_names_speak_nothing_else() {
    let rules = testing::rules(JUDGED);
    let fits = |to: &str, name: &str, kind| {
        let to = Destination::new(to.parse().unwrap());
        fits_unnamed(&rules, to, &[name.to_owned()], kind).is_ok()
    };
    for web in ["192.0.2.1:80", "192.0.2.1:443"] {
        assert!(
            !fits(web, "a.test", UnnamedKind::Other) && fits(web, "b.test", UnnamedKind::Other)
        );
    }
    assert!(fits("192.0.2.1:22", "a.test", UnnamedKind::Other));
    assert!(!fits("192.0.2.1:22", "a.test", UnnamedKind::Nameless));
}

#[tokio::test]
async fn one_that_only_listens_is_served() {
    let world = world(BY_NAME).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    let mut guest = world.connect();
    guest.shutdown().await.unwrap();
    let mut server = world.accept().await;
    server.write_all(b"news").await.unwrap();
    let mut heard = [0; 4];
    timeout(Duration::from_secs(5), guest.read_exact(&mut heard)).await.unwrap().unwrap();
    drop((guest, server));
    assert_eq!(world.notes.wait_for(Verdict::Allowed).await.name.as_deref(), Some("git.test"));
}

const JUDGED: &str =
    r#"{"mode": "allow-all", "requests": [{"domain": "a.test", "action": "deny"}]}"#;

#[tokio::test]
async fn a_change_of_policy_asks_what_was_asked_before() {
    // It says that it is for c.test, which is elsewhere.
    let world = world(JUDGED).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "a.test").await);
    let (mut elsewhere, _first) = world.passes(&hello("c.test")).await;
    world.set(r#"{"mode": "custom", "domains": ["c.test"]}"#);
    ends(&mut elsewhere).await;
    let last = world.notes.lines().pop().unwrap();
    assert_eq!(last, "Cut c.test 100.97.0.1 was not given out for this name");

    // It keeps its name to itself, and may be for one that is judged now.
    world.set(&JUDGED.replace("a.test", "z.test"));
    let (mut nameless, _second) = world.passes(&hello("127.0.0.1")).await;
    let (mut other, mut third) = world.passes(b"SSH-2.0-test\r\n").await;
    world.set(JUDGED);
    ends(&mut nameless).await;
    other.write_all(b"still").await.unwrap();
    third.read_exact(&mut [0; 5]).await.unwrap();

    // It was not inspected.
    world.set(r#"{"mode": "allow-all"}"#);
    let OpenDecision::Dial(_, unseen) = world.dispatcher.open(world.to) else {
        panic!("it is not dialled")
    };
    world.set(JUDGED);
    timeout(Duration::from_secs(1), unseen.is_cut()).await.unwrap();
}

#[tokio::test]
async fn waiting_is_no_way_around_a_rule() {
    let world = world(BY_NAME).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    let mut guest = world.connect();
    let mut server = world.accept().await;
    guest.write_all(&hello("b.test")).await.unwrap();
    ends(&mut guest).await;
    assert_eq!(server.read(&mut [0; 16]).await.unwrap_or(0), 0, "the server heard it");
    let denied = world.notes.wait_for(Verdict::Denied).await;
    assert_eq!(denied.name.as_deref(), Some("b.test"));
    // And one that may continue does so with its name.
    let mut guest = world.connect();
    let mut server = world.accept().await;
    guest.write_all(&hello("a.test")).await.unwrap();
    server.read_exact(&mut vec![0; hello("a.test").len()]).await.unwrap();
    let open = world.dispatcher.open_now();
    assert_eq!(open.len(), 1);
    assert_eq!(open[0].name.as_deref(), Some("a.test"));
}

#[tokio::test]
async fn a_change_of_policy_cuts_what_no_longer_fits() {
    let world = world(BY_NAME).await;
    let (mut by_name, _first) = world.passes(&hello("a.test")).await;
    assert!(world.dispatcher.names.gave(world.to.ip(), "git.test").await);
    let (mut by_port, _second) = world.passes(b"SSH-2.0-test\r\n").await;
    assert_eq!(world.dispatcher.open_now().len(), 2);

    world.set(r#"{"mode": "custom", "domains": ["*.test"]}"#);
    ends(&mut by_port).await;
    let cut = world.notes.wait_for(Verdict::Cut).await;
    assert_eq!(cut.name.as_deref(), Some("git.test"));
    by_name.write_all(b"still").await.unwrap();

    world.set(r#"{"mode": "allow-all", "requests": [{"domain": "a.test", "action": "deny"}]}"#);
    ends(&mut by_name).await;
    assert!(
        world.notes.lines().contains(&"Cut a.test requests to a.test are judged now".to_owned())
    );

    world.set(r#"{"mode": "allow-all"}"#);
    let OpenDecision::Dial(to, open) = world.dispatcher.open(world.to) else {
        panic!("it is not dialled")
    };
    assert_eq!(to, world.server.local_addr().unwrap());
    let flow = world.dispatcher.datagrams(Protocol::Udp, world.to).unwrap();
    world.set(r#"{"mode": "deny-all"}"#);
    timeout(Duration::from_secs(1), open.is_cut()).await.unwrap();
    timeout(Duration::from_secs(1), flow.open.is_cut()).await.unwrap();
    assert!(matches!(world.dispatcher.open(world.to), OpenDecision::Refuse));
    assert!(world.dispatcher.datagrams(Protocol::Icmp, world.to).is_none());
}

#[tokio::test]
async fn some_addresses_are_refused_whatever_the_policy() {
    let world = world(r#"{"mode": "allow-all"}"#).await;
    for (to, why) in [
        ("169.254.169.254:80", "metadata"),
        ("[fd00:ec2::254]:80", "metadata"),
        ("100.97.0.1:1", "the host's loopback"),
        ("[fd73:616e:646b:1::1]:80", "the host's loopback"),
        ("127.0.0.1:80", "the host's loopback"),
        ("100.96.0.1:80", "other sandboxes"),
        ("100.96.3.2:80", "other sandboxes"),
        ("[::ffff:169.254.169.254]:80", "IPv4 inside IPv6"),
        ("[64:ff9b::7f00:1]:80", "the host's loopback"),
        ("224.0.0.1:80", "multicast"),
    ] {
        let to: SocketAddr = to.parse().unwrap();
        assert!(matches!(world.dispatcher.open(to), OpenDecision::Refuse), "{to}");
        assert!(world.dispatcher.datagrams(Protocol::Udp, to).is_none(), "{to}");
        let note =
            world.notes.all().into_iter().rfind(|note| note.protocol == Protocol::Tcp).unwrap();
        assert_eq!(note.rule, format!("always refused: {why}"), "{to}");
        assert_eq!((note.to, note.verdict), (Some(to), Verdict::Denied));
    }
}

#[tokio::test]
async fn allow_all_looks_at_everything_where_requests_are_judged() {
    let world = world(JUDGED).await;
    // Nothing is known to lead to a name that is judged, but its address may be written down somewhere.
    drop(world.passes(&hello("127.0.0.1")).await);
    assert!(world.dispatcher.names.gave(world.to.ip(), "a.test").await);
    // Others pass all the same, and so does a connection that has no name and is no HTTP.
    drop(world.passes(&hello("b.test")).await);
    drop(world.passes(b"SSH-2.0-test\r\n").await);
    world.refused(&hello("127.0.0.1")).await;
    world.refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    assert!(world.dispatcher.datagrams(Protocol::Udp, world.to).is_none());
    let mut silent = world.connect();
    let mut server = world.accept().await;
    server.write_all(b"220").await.unwrap();
    silent.read_exact(&mut [0; 3]).await.unwrap();
}

#[tokio::test]
async fn a_name_that_is_told_too_slowly_is_not_waited_for() {
    let world = world(BY_NAME).await;
    let mut guest = world.connect();
    let slow = async {
        for byte in hello("a.test").into_iter().cycle() {
            tokio::time::sleep(Duration::from_millis(200)).await;
            guest.write_all(&[byte]).await?;
        }
        io::Result::Ok(())
    };
    let told = timeout(Duration::from_secs(15), slow).await;
    assert!(told.expect("it was listened to all along").is_err());
    assert_eq!(world.notes.lines(), ["Denied - no rule allows it; it told no name"]);
}

#[tokio::test]
async fn nobody_outside_is_on_record() {
    let world = world(BY_NAME).await;
    let World { dispatcher, notes, server, to, _names } = world;
    drop(server);
    let (mut guest, ours) = tokio::io::duplex(1 << 16);
    guest.write_all(&hello("a.test")).await.unwrap();
    dispatcher.carry(ours, to).await;
    ends(&mut guest).await;
    let failed = notes.wait_for(Verdict::Failed).await;
    assert_eq!(failed.name.as_deref(), Some("a.test"));
    assert!(failed.detail.is_some());
}

#[tokio::test]
async fn a_flood_of_refusals_does_not_fill_the_journal() {
    let world = world(r#"{"mode": "deny-all"}"#).await;
    for port in 1..=5000 {
        let to = SocketAddr::from(([198, 51, 100, 1], port));
        assert!(matches!(world.dispatcher.open(to), OpenDecision::Refuse));
    }
    world.dispatcher.finish();
    let notes = world.notes.all();
    assert!(notes.len() < 1000, "{} lines", notes.len());
    let beyond = notes
        .iter()
        .filter_map(|note| note.detail.as_ref())
        .filter_map(|detail| detail.strip_suffix(" more within a second")?.parse::<usize>().ok());
    let counted = notes.iter().filter(|note| note.detail.is_none()).count();
    assert_eq!(beyond.sum::<usize>() + counted, 5000);
}

mod held {
    //! Connections whose host is not approved yet.

    use super::*;
    use crate::net::testing::TestGate;

    const OPEN: &str = r#"{"mode": "allow-all"}"#;
    const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n";

    async fn gated(policy: &str) -> (Arc<TestGate>, World) {
        let gate = Arc::<TestGate>::default();
        let world = world_behind(gate.clone(), policy).await;
        (gate, world)
    }

    fn no() -> Result<(), String> {
        Err("it was denied: not today".to_owned())
    }

    async fn heard(server: &mut TcpStream, what: &[u8]) {
        let mut heard = vec![0; what.len()];
        timeout(Duration::from_secs(5), server.read_exact(&mut heard)).await.unwrap().unwrap();
        assert_eq!(heard, what);
    }

    #[tokio::test]
    async fn a_connection_waits_for_its_host_and_the_next_does_not() {
        let (gate, world) = gated(OPEN).await;
        gate.answer("100.97.0.1", Ok(()));
        let first = hello("a.test");
        let mut guest = world.connect();
        guest.write_all(&first).await.unwrap();
        gate.is_asked("a.test").await;
        world.nobody_came().await;
        assert_eq!(world.dispatcher.held(), 1);
        gate.answer("a.test", Ok(()));
        let mut server = world.accept().await;
        heard(&mut server, &first).await;
        assert_eq!(world.dispatcher.held(), 0);
        drop(world.passes(&first).await);
        assert_eq!(gate.asked(), ["a.test"]);
    }

    #[tokio::test]
    async fn a_denial_ends_it_and_http_is_told_why() {
        let (gate, world) = gated(OPEN).await;
        assert!(world.dispatcher.names.gave(world.to.ip(), "a.test").await);
        let mut guest = world.connect();
        guest.write_all(GET).await.unwrap();
        gate.is_asked("a.test").await;
        gate.answer("a.test", no());
        let mut answer = String::new();
        timeout(Duration::from_secs(5), guest.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("not today"), "{answer}");
        world.nobody_came().await;
        let denied = world.notes.wait_for(Verdict::Denied).await;
        assert_eq!(denied.name.as_deref(), Some("a.test"));
        assert!(denied.rule.contains("not today"), "{}", denied.rule);
        world.refused(&hello("a.test")).await;
    }

    #[tokio::test]
    async fn a_name_that_is_made_up_does_not_open_an_address() {
        let (gate, world) = gated(OPEN).await;
        // It is approved, and elsewhere.
        gate.answer("c.test", Ok(()));
        let mut guest = world.connect();
        guest.write_all(&hello("c.test")).await.unwrap();
        gate.is_asked("100.97.0.1").await;
        world.nobody_came().await;
        gate.answer("100.97.0.1", no());
        ends(&mut guest).await;
        // A name that is not approved is not looked up, wherever it leads.
        let mut guest = world.connect();
        guest.write_all(&hello("data.evil.test")).await.unwrap();
        gate.is_asked("data.evil.test").await;
        assert_eq!(*world._names.asked.lock().unwrap(), [""; 0]);
    }

    #[tokio::test]
    async fn silence_and_other_protocols_wait_for_the_address() {
        let (gate, world) = gated(OPEN).await;
        let silent = world.connect();
        gate.is_asked("100.97.0.1").await;
        world.nobody_came().await;
        gate.answer("100.97.0.1", Ok(()));
        let mut server = world.accept().await;
        server.write_all(b"220").await.unwrap();
        // Once it says for whom it is, that is asked as well.
        let mut silent = silent;
        silent.read_exact(&mut [0; 3]).await.unwrap();
        silent.write_all(GET).await.unwrap();
        gate.is_asked("a.test").await;
        gate.answer("a.test", no());
        ends(&mut silent).await;
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_or(0), 0, "the server heard it");
    }

    #[tokio::test]
    async fn what_is_said_while_it_is_held_is_heard() {
        let (gate, world) = gated(OPEN).await;
        let mut guest = world.connect();
        gate.is_asked("100.97.0.1").await;
        guest.write_all(b"SSH-2.0-test\r\n").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        gate.answer("100.97.0.1", Ok(()));
        let mut server = world.accept().await;
        heard(&mut server, b"SSH-2.0-test\r\n").await;
        // It counts as if it had been sent at once.
        let (gate, world) = gated(OPEN).await;
        let mut guest = world.connect();
        gate.is_asked("100.97.0.1").await;
        guest.write_all(GET).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        gate.answer("100.97.0.1", Ok(()));
        gate.is_asked("a.test").await;
        world.nobody_came().await;
    }

    #[tokio::test]
    async fn requests_that_hide_their_host_wait_for_the_address() {
        let (gate, world) = gated(OPEN).await;
        gate.answer("a.test", Ok(()));
        assert!(world.dispatcher.names.gave(world.to.ip(), "a.test").await);
        let mut guest = world.connect();
        guest.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        gate.is_asked("100.97.0.1").await;
        world.nobody_came().await;
    }

    #[tokio::test]
    async fn a_name_is_not_looked_up_before_it_is_approved() {
        let (gate, world) = gated(OPEN).await;
        let stand_in = {
            let names = &world.dispatcher.names;
            let before = names.stand_in("100.96.128.0".parse().unwrap());
            assert_eq!(before, None);
            let question =
                crate::net::dns::tests::question("a.test", hickory_proto::rr::RecordType::A, true);
            let answer = names.datagram(&question).await.unwrap();
            let answer = hickory_proto::op::Message::from_vec(&answer).unwrap();
            let [ip] = crate::net::dns::tests::addresses(&answer).try_into().unwrap();
            ip.parse::<std::net::IpAddr>().unwrap()
        };
        assert_eq!(world.dispatcher.names.stand_in(stand_in).as_deref(), Some("a.test"));
        let to = SocketAddr::new(stand_in, world.to.port());
        assert!(matches!(world.dispatcher.open(to), OpenDecision::Serve));
        let (mut guest, ours) = tokio::io::duplex(1 << 16);
        tokio::spawn(Arc::clone(&world.dispatcher).carry(ours, to));
        let first = hello("a.test");
        guest.write_all(&first).await.unwrap();
        gate.is_asked("a.test").await;
        world.nobody_came().await;
        gate.answer("a.test", Ok(()));
        let mut server = world.accept().await;
        heard(&mut server, &first).await;
        drop((guest, server));
        let allowed = world.notes.wait_for(Verdict::Allowed).await;
        assert_eq!((allowed.name.as_deref(), allowed.to), (Some("a.test"), Some(world.to)));
        assert_eq!(gate.asked(), ["a.test"]);
    }

    #[tokio::test]
    async fn what_the_rules_refuse_is_never_asked_for() {
        let (gate, world) = gated(BY_NAME).await;
        world.refused(&hello("b.test")).await;
        world.refused(b"SSH-2.0-test\r\n").await;
        assert_eq!(gate.asked(), [""; 0]);
        world.set(r#"{"mode": "deny-all"}"#);
        assert!(matches!(world.dispatcher.open(world.to), OpenDecision::Refuse));
    }

    #[tokio::test]
    async fn datagrams_are_refused_and_asked_for() {
        let (gate, world) = gated(OPEN).await;
        assert!(world.dispatcher.datagrams(Protocol::Udp, world.to).is_none());
        assert_eq!(gate.asked(), ["100.97.0.1"]);
        let denied = world.notes.wait_for(Verdict::Denied).await;
        assert!(denied.rule.contains("approval"), "{}", denied.rule);
        gate.answer("100.97.0.1", Ok(()));
        assert!(world.dispatcher.datagrams(Protocol::Udp, world.to).is_some());
    }

    #[tokio::test]
    async fn only_so_many_are_held_and_who_leaves_makes_room() {
        let (gate, world) = gated(OPEN).await;
        let mut held = Vec::new();
        for _ in 0..super::super::hold::MOST_HELD {
            let mut guest = world.connect();
            guest.write_all(&hello("a.test")).await.unwrap();
            held.push(guest);
        }
        for _ in 0..500 {
            if world.dispatcher.held() == super::super::hold::MOST_HELD {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        world.refused(&hello("a.test")).await;
        let denied = world.notes.wait_for(Verdict::Denied).await;
        assert!(denied.rule.contains("too many"), "{}", denied.rule);
        drop(held);
        for _ in 0..500 {
            if world.dispatcher.held() == 0 {
                return assert_eq!(gate.asked(), ["a.test"]);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} are still held", world.dispatcher.held());
    }
}
