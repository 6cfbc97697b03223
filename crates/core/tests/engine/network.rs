//! A session's network through the engine: there from the start, gone with the machine, back with the next daemon, and counted.

use std::net::SocketAddr;
use std::time::Duration;

use sandkeep_core::engine::{ConnectionFilter, Engine, Fork, Stop};
use sandkeep_core::model::{
    Action, AddressRule, Credential, Mode, Patch, Policy, ProjectNetwork, RequestMatch,
    RequestRule, Verdict,
};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, detached, name, printed, project, sh, small, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// A server on the host's loopback that sends back what it gets, and lets sandboxes of `house` come to it.
async fn echo(house: &mut House) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    house.settings.network.except.push(address.to_string().parse().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    if stream.write_all(&buffer[..read]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    address
}

/// Sends a line to the server from inside, and returns the answer.
async fn says(engine: &Engine, sandbox: &str, server: SocketAddr) -> String {
    let port = server.port();
    let script = format!(
        "exec 3<>/dev/tcp/100.97.0.1/{port} && echo hello >&3 && read -t 5 line <&3 && echo \"$line\""
    );
    sh(engine, sandbox, &format!("bash -c '{script}' 2>/dev/null")).await.out
}

fn custom(allow: &[&str]) -> Policy {
    let allow: Vec<AddressRule> = allow.iter().map(|text| text.parse().unwrap()).collect();
    Policy { mode: Mode::Custom, allow, ..Policy::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_online_and_what_it_sent_is_counted() {
    let mut house = house!();
    let server = echo(&mut house).await;
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    assert_eq!(says(&engine, "app", server).await, "hello\n");
    assert!(sh(&engine, "app", "cat /etc/resolv.conf").await.out.contains("100.96.0.1"));
    let stopped = engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let usage = stopped.session.unwrap().usage;
    assert_eq!((usage.network_in, usage.network_out), (6, 6), "both ways, payload only");
    assert_eq!(stopped.sandbox.totals.network_in, 6);
    assert!(stopped.snapshot.is_none_or(|snapshot| snapshot.item.layers.len() < 3));

    let all = ConnectionFilter::default();
    let listed = engine.connections(&project(), &name("app"), &all, 10, None).await.unwrap().items;
    let one = listed.iter().find(|it| it.bytes_in == 6).expect("it is on record");
    assert_eq!((one.verdict, one.bytes_out), (Verdict::Allowed, 6));
    assert_eq!(one.to, Some(SocketAddr::new("100.97.0.1".parse().unwrap(), server.port())));
    assert!(one.ended_at.is_some() && !one.rule.is_empty(), "{one:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_network_comes_back_with_the_next_daemon() {
    let mut house = house!();
    let server = echo(&mut house).await;
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    assert_eq!(says(&engine, "app", server).await, "hello\n");
    let engine = house.reopen(engine).await;
    assert_eq!(says(&engine, "app", server).await, "hello\n");
    engine.checkpoint(&project(), &name("app"), Default::default()).await.unwrap();
    assert_eq!(says(&engine, "app", server).await, "hello\n", "on another root as well");
    assert!(sh(&engine, "app", "cat /etc/resolv.conf").await.out.contains("100.96.0.1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_hold_at_once_and_projects_have_the_last_word() {
    let mut house = house!();
    let server = echo(&mut house).await;
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let reach = async || says(&engine, "app", server).await == "hello\n";
    let set = async |policy| engine.set_network(&project(), &name("app"), policy).await.unwrap();
    assert!(reach().await);

    // An open one is cut, and its holder notices.
    let held = format!(
        "exec 3<>/dev/tcp/100.97.0.1/{} || exit 9; echo ready; read -t 20 line <&3; echo $?",
        server.port()
    );
    let waiting = async { sh(&engine, "app", &format!("bash -c '{held}'")).await.out };
    let begun = sandkeep_core::model::now();
    let cut = async {
        let open = ConnectionFilter { open: true, ..ConnectionFilter::default() };
        for _ in 0..200 {
            let listed = engine.connections(&project(), &name("app"), &open, 10, None).await;
            // The one before may not have ended quite.
            if listed.unwrap().items.iter().any(|it| it.at >= begun) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        set(Some(Policy { mode: Mode::DenyAll, ..Policy::default() })).await;
    };
    let (ended, ()) = tokio::join!(waiting, cut);
    assert_eq!(ended, "ready\n1\n", "it was cut long before its patience was over");
    assert!(!reach().await);
    set(Some(custom(&["10.0.0.0/8"]))).await;
    assert!(!reach().await);
    set(Some(custom(&["100.97.0.0/16"]))).await;
    assert!(reach().await);

    let bound =
        ProjectNetwork { bound: Some(custom(&["10.0.0.0/8"])), ..ProjectNetwork::default() };
    engine.set_project_network(&project(), bound).await.unwrap();
    assert!(!reach().await, "no sandbox gets beyond it");
    let default = Policy { mode: Mode::DenyAll, ..Policy::default() };
    let free = ProjectNetwork { default, ..ProjectNetwork::default() };
    engine.set_project_network(&project(), free).await.unwrap();
    assert!(reach().await, "it has a policy of its own");
    set(None).await;
    assert!(!reach().await, "and now the project's");

    let denied = ConnectionFilter { verdict: Some(Verdict::Denied), ..ConnectionFilter::default() };
    let listed = engine.connections(&project(), &name("app"), &denied, 100, None).await.unwrap();
    assert!(listed.items.iter().any(|it| it.rule.contains("deny-all")), "{:?}", listed.items);
    assert!(listed.items.iter().any(|it| it.rule.contains("bound")), "{:?}", listed.items);
}

#[tokio::test(flavor = "multi_thread")]
async fn header_values_do_not_rest_and_their_authority_is_trusted_inside() {
    const VALUE: &str = "Bearer of-something-nobody-may-see";
    let house = house!();
    let engine = house.open().await;
    let rule = RequestRule {
        domain: "api.test".parse().unwrap(),
        matches: RequestMatch::default(),
        action: Action::Headers(
            [("authorization".to_owned(), Credential::Plain(VALUE.to_owned().into()))].into(),
        ),
    };
    let policy = Policy { requests: vec![rule], ..Policy::default() };
    let mut create = small("app");
    create.patch.network = Some(Some(policy));
    engine.create(&project(), create, None).await.unwrap();
    let certificate = sh(&engine, "app", "cat /run/sandkeep/ca.pem").await.out;
    assert!(certificate.starts_with("-----BEGIN CERTIFICATE-----"), "{certificate}");
    let bundle = sh(&engine, "app", "cat $SSL_CERT_FILE").await.out;
    assert!(bundle.contains(certificate.trim()), "the one at hand is among those trusted");

    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let again = sh(&engine, "app", "cat $NODE_EXTRA_CA_CERTS").await.out;
    assert_eq!(again, certificate, "the same in every session");
    let fork = Fork { name: Some(name("other")), start: true, ..Fork::default() };
    engine.fork(&project(), &name("app"), fork, None).await.unwrap();
    let other = sh(&engine, "other", "cat /run/sandkeep/ca.pem").await.out;
    assert_ne!(other, certificate, "a fork has its own");

    let engine = house.reopen(engine).await;
    let found = std::process::Command::new("grep")
        .args(["-r", "-l", "-a", "of-something-nobody"])
        .arg(house.data())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "not on disk");

    let unknown = Patch {
        network: Some(Some(Policy {
            requests: vec![RequestRule {
                domain: "api.test".parse().unwrap(),
                matches: RequestMatch::default(),
                action: Action::Headers(
                    [("x".to_owned(), Credential::Plain("${secret:NOBODY}".to_owned().into()))]
                        .into(),
                ),
            }],
            ..Policy::default()
        })),
        ..Patch::default()
    };
    let refused = engine.update(&project(), &name("app"), unknown).await.unwrap_err();
    assert!(refused.to_string().contains("NOBODY"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_a_project_are_bounded_together() {
    let mut house = house!();
    let server = echo(&mut house).await;
    let engine = house.open().await;
    for sandbox in ["app", "other"] {
        engine.create(&project(), small(sandbox), None).await.unwrap();
    }
    let allow = async |most: Option<u32>| {
        let network = ProjectNetwork { max_connections: most, ..ProjectNetwork::default() };
        engine.set_project_network(&project(), network).await
    };
    let refused = allow(Some(0)).await.expect_err("none would be a policy");
    assert!(refused.to_string().contains("network.max_connections"), "{refused}");
    allow(Some(3)).await.unwrap();
    let port = server.port();
    let held = format!(
        "for n in 4 5 6; do eval \"exec $n<>/dev/tcp/100.97.0.1/{port}\" || exit 9; done; echo held; sleep 1000"
    );
    let holder = detached(&engine, "app", &["bash", "-c", &held]).await;
    until("connections", async || {
        (printed(&engine, "app", &holder).await == b"held\n").then_some(())
    })
    .await;
    assert_ne!(says(&engine, "other", server).await, "hello\n", "the project has all it may have");
    let line = until("a line in the journal", async || {
        let all = ConnectionFilter::default();
        let listed = engine.connections(&project(), &name("other"), &all, 10, None).await.unwrap();
        listed.items.into_iter().find(|line| line.verdict == Verdict::Denied)
    })
    .await;
    assert!(line.rule.contains("the project's sandboxes may have 3"), "{line:?}");
    assert_eq!(line.to.map(|to| to.port()), Some(port));
    // At once, and without touching what is open.
    allow(Some(5)).await.unwrap();
    assert_eq!(says(&engine, "other", server).await, "hello\n");
    allow(None).await.unwrap();
    assert_eq!(says(&engine, "other", server).await, "hello\n");
    engine.shutdown().await;
}
