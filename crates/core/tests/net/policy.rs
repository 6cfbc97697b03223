//! Policies as a sandbox meets them: real packets, the real name server, a real server on the host's loopback.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use sandkeep_core::engine::{ConnectionFilter, Create, Engine};
use sandkeep_core::model::{Connection, Patch, Policy, ProjectNetwork, Protocol, Verdict};
use sandkeep_core::net::UpstreamSettings;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, Ran, name, project, sh, small};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A server that greets silent clients, and answers requests.
struct Server {
    port: u16,
    _tasks: JoinSet<()>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port to listen on");
        let port = listener.local_addr().expect("it is bound").port();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(converse(stream));
            }
        });
        Self { port, _tasks: tasks }
    }
}

async fn converse(mut stream: TcpStream) {
    let mut said = Vec::new();
    let head = async {
        while !said.ends_with(b"\r\n\r\n") && said.len() < 4096 {
            said.push(stream.read_u8().await?);
        }
        std::io::Result::Ok(())
    };
    if let Ok(Ok(())) = tokio::time::timeout(Duration::from_millis(900), head).await {
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\nwelcome";
        let _ = stream.write_all(answer.as_bytes()).await;
        let _ = stream.shutdown().await;
    } else {
        let _ = stream.write_all(b"greeting\n").await;
    }
    // Held open until the other side ends it.
    while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {}
}

/// An engine on whose host `a.test`, `b.test` and `held.test` lead to the server, and no other name
/// server is asked.
async fn open(house: &mut House, server: &Server) -> Engine {
    let here = vec!["127.0.0.1".parse().expect("an address")];
    let names = ["a.test", "b.test", "held.test"].map(|name| (name.to_owned(), here.clone()));
    house.settings.network = UpstreamSettings {
        except: vec![format!("127.0.0.1:{}", server.port).parse().expect("an address")],
        resolvers: vec![SocketAddr::from(([127, 0, 0, 1], 9))],
        hosts: BTreeMap::from(names),
        ca: None,
    };
    house.open().await
}

fn policy(json: &str, server: &Server) -> Policy {
    serde_json::from_str(&json.replace("PORT", &server.port.to_string())).expect("a policy")
}

fn with(sandbox: &str, policy: Policy) -> Create {
    let create = small(sandbox);
    let patch = Patch { network: Some(Some(policy)), ..create.patch };
    Create { patch, ..create }
}

/// Asks for a page at `to`, saying that it is for `host`.
async fn get(engine: &Engine, to: &str, port: u16, host: &str) -> Ran {
    let line = format!(
        r#"timeout 10 bash -c 'exec 3<>/dev/tcp/{to}/{port} &&
            printf "GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n" >&3 && cat <&3'"#
    );
    sh(engine, "app", &line).await
}

async fn journal(engine: &Engine) -> Vec<Connection> {
    let filter = ConnectionFilter::default();
    engine
        .connections(&project(), &name("app"), &filter, 100, None)
        .await
        .expect("the journal reads")
        .items
}

/// Waits, for a bounded time, until something like this is on record.
async fn on_record(engine: &Engine, wanted: impl Fn(&Connection) -> bool) -> Connection {
    let mut last = Vec::new();
    for _ in 0..100 {
        last = journal(engine).await;
        if let Some(found) = last.iter().find(|line| wanted(line)) {
            return found.clone();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not on record, but only {last:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_reachable_and_its_neighbour_at_the_same_address_is_not() {
    let mut house = house!();
    let server = Server::start().await;
    let engine = open(&mut house, &server).await;
    let by_name = policy(r#"{"mode": "custom", "domains": ["a.test"]}"#, &server);
    engine.create(&project(), with("app", by_name), None).await.unwrap();

    let page = get(&engine, "a.test", server.port, "a.test").await;
    assert!(page.out.ends_with("welcome"), "{page:?}");
    let told = on_record(&engine, |line| line.protocol == Protocol::Tcp).await;
    assert_eq!((told.name.as_deref(), told.verdict), (Some("a.test"), Verdict::Allowed));
    assert_eq!(told.rule, "domain a.test");

    let neighbour = get(&engine, "a.test", server.port, "b.test").await;
    assert!(!neighbour.out.contains("welcome"), "{neighbour:?}");
    let denied = on_record(&engine, |line| line.name.as_deref() == Some("b.test")).await;
    assert_eq!((denied.verdict, denied.rule.as_str()), (Verdict::Denied, "no rule allows it"));

    // The name is not even resolved, and the address alone is no way either.
    let lookup = sh(&engine, "app", "getent ahostsv4 a.test; getent ahostsv4 b.test").await;
    assert!(
        lookup.out.starts_with("100.97.0.1 ") && lookup.command.exit_code == Some(2),
        "{lookup:?}"
    );
    on_record(&engine, |line| line.protocol == Protocol::Dns && line.verdict == Verdict::Denied)
        .await;
    let raw = get(&engine, "100.97.0.1", server.port, "100.97.0.1").await;
    assert!(!raw.out.contains("welcome"), "{raw:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn some_addresses_are_out_of_reach_whatever_the_policy() {
    let mut house = house!();
    let server = Server::start().await;
    let engine = open(&mut house, &server).await;
    let everything = policy(r#"{"mode": "allow-all"}"#, &server);
    engine.create(&project(), with("app", everything), None).await.unwrap();
    // What the operator opened is reachable, by its name or without one.
    for host in ["b.test", "host.sandkeep.internal"] {
        let page = get(&engine, host, server.port, host).await;
        assert!(page.out.ends_with("welcome"), "{page:?} {:#?}", journal(&engine).await);
    }
    for (to, port, why) in [
        ("169.254.169.254", 80, "metadata"),
        ("100.97.0.1", 1, "the host's loopback"),
        ("100.96.0.1", 80, "other sandboxes"),
        ("100.96.9.2", 80, "other sandboxes"),
    ] {
        let refused = get(&engine, to, port, to).await;
        assert!(refused.err.contains("refused"), "{to}: {refused:?}");
        let rule = format!("always refused: {why}");
        let at = SocketAddr::new(to.parse().unwrap(), port);
        let line = on_record(&engine, |line| line.to == Some(at)).await;
        assert_eq!((line.verdict, line.rule), (Verdict::Denied, rule), "{to}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_policy_holds_at_once_and_cuts_what_is_open() {
    let mut house = house!();
    let server = Server::start().await;
    let engine = open(&mut house, &server).await;
    let held = policy(r#"{"mode": "custom", "domains": ["held.test:PORT"]}"#, &server);
    engine.create(&project(), with("app", held), None).await.unwrap();
    let line = format!(
        "exec 3<>/dev/tcp/held.test/{} && read -r said <&3 && echo $said > /work/said && cat <&3; echo ended >> /work/said",
        server.port
    );
    let holding = {
        let engine = engine.clone();
        let line = format!("timeout 60 bash -c '{line}'");
        tokio::spawn(async move { sh(&engine, "app", &line).await })
    };
    for _ in 0..100 {
        if sh(&engine, "app", "cat /work/said").await.out == "greeting\n" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let open = journal(&engine).await;
    assert!(open.iter().any(|line| line.ended_at.is_none()), "{open:#?}");

    let nothing = policy(r#"{"mode": "deny-all"}"#, &server);
    engine.set_network(&project(), &name("app"), Some(nothing)).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(10), holding).await;
    ended.expect("the connection goes on").unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/said").await.out, "greeting\nended\n");
    let cut = on_record(&engine, |line| line.verdict == Verdict::Cut).await;
    assert_eq!((cut.name.as_deref(), cut.rule.as_str()), (Some("held.test"), "deny-all"));
    let lookup = sh(&engine, "app", "getent ahostsv4 held.test").await;
    assert_eq!((lookup.command.exit_code, lookup.out.as_str()), (Some(2), ""));

    // And back again, as far as the project lets it.
    let bound = policy(r#"{"mode": "custom", "domains": ["a.test"]}"#, &server);
    let network = ProjectNetwork { bound: Some(bound), ..ProjectNetwork::default() };
    engine.set_project_network(&project(), network).await.unwrap();
    let everything = policy(r#"{"mode": "allow-all"}"#, &server);
    engine.set_network(&project(), &name("app"), Some(everything)).await.unwrap();
    assert!(get(&engine, "a.test", server.port, "a.test").await.out.ends_with("welcome"));
    let beyond = get(&engine, "a.test", server.port, "b.test").await;
    assert!(!beyond.out.contains("welcome"), "{beyond:?}");
    let line = on_record(&engine, |line| line.rule.starts_with("project bound: ")).await;
    assert_eq!(line.verdict, Verdict::Denied);
}
