//! What waits for an approval in real sandboxes: connections that are held, containers that are
//! frozen, machines that are paused.

use std::net::SocketAddr;
use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{ApprovalFilter, Caller, ConnectionFilter, Engine};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Approval, ApprovalAnswer, ApprovalPolicy, ApprovalStatus, ApprovalSubject, Command, CommandId,
    CommandState, KeyId, Scope, Verdict,
};
use sandkeep_core::net::UpstreamSettings;
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{
    House, detached, machine, name, ok, printed, project, sh, small, until,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A server that `a.test` and `b.test` lead to; it counts who came.
async fn server(
    house: &mut House,
) -> (u16, std::sync::Arc<std::sync::atomic::AtomicUsize>, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    let came = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
    let here = vec!["127.0.0.1".parse().expect("an address")];
    house.settings.network = UpstreamSettings {
        except: vec![format!("127.0.0.1:{port}").parse().expect("an address")],
        resolvers: vec![SocketAddr::from(([127, 0, 0, 1], 9))],
        hosts: ["a.test", "b.test"].map(|name| (name.to_owned(), here.clone())).into(),
        ca: None,
    };
    let mut tasks = JoinSet::new();
    let counted = std::sync::Arc::clone(&came);
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            connections.spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    match stream.read_u8().await {
                        Ok(byte) => head.push(byte),
                        Err(_) => return,
                    }
                }
                let answer =
                    "HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\nwelcome";
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    (port, came, tasks)
}

fn policy() -> ApprovalPolicy {
    ApprovalPolicy { hosts: true, ..ApprovalPolicy::default() }
}

fn get(host: &str, port: u16) -> String {
    format!(
        r#"exec 3<>/dev/tcp/{host}/{port} && printf "GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n" >&3 && cat <&3"#
    )
}

async fn pending(engine: &Engine) -> Approval {
    until("an approval", async || {
        let status = Some(ApprovalStatus::Pending);
        let filter = ApprovalFilter { status, ..ApprovalFilter::default() };
        engine.approvals(&project(), &filter, &Page::all()).expect("a list").items.pop()
    })
    .await
}

async fn answer(engine: &Engine, approval: &Approval, answer: ApprovalAnswer) {
    let key = KeyId::fresh();
    let caller =
        Caller { project: project(), scope: Scope::Admin, key, approve: true, until: None };
    let answered = engine.answer_approval(&caller, &approval.id, answer, "seen".to_owned()).await;
    answered.expect("it is answered");
}

async fn ended(engine: &Engine, sandbox: &str, command: &CommandId) -> Command {
    // A wait for a command that sleeps in a paused machine answers at once after a restart.
    until("it ends", async || {
        let found = engine.wait(&project(), &name(sandbox), command).await;
        Some(found.expect("it is on record")).filter(|one| one.state != CommandState::Running)
    })
    .await
}

async fn said(engine: &Engine, sandbox: &str, command: &CommandId) -> String {
    String::from_utf8_lossy(&printed(engine, sandbox, command).await).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_contact_with_a_host_waits_and_is_remembered() {
    let mut house = house!();
    let (port, came, _tasks) = server(&mut house).await;
    let engine = house.open().await;
    let mut create = small("app");
    create.patch.approvals = Some(Some(policy()));
    engine.create(&project(), create, None).await.expect("a sandbox");
    // It ticks all the while, so that a test sees whether it is suspended.
    let line = format!("(while :; do echo tick; sleep 1; done) & {}; kill %1", get("a.test", port));
    let held = detached(&engine, "app", &["bash", "-c", &line]).await;
    let asked = pending(&engine).await;
    assert_eq!(asked.subject, ApprovalSubject::Host);
    assert_eq!(asked.target.as_deref(), Some("a.test"));
    assert_eq!(asked.question, format!("connect to a.test:{port}"));
    until("it stands still", async || {
        let before = said(&engine, "app", &held).await.len();
        tokio::time::sleep(Duration::from_millis(2600)).await;
        (said(&engine, "app", &held).await.len() == before).then_some(())
    })
    .await;
    // Any call resumes it, and is answered.
    assert_eq!(ok(&engine, "app", "echo here").await, "here\n");
    assert_eq!(came.load(std::sync::atomic::Ordering::SeqCst), 0, "the server heard of it");
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    ended(&engine, "app", &held).await;
    let text = said(&engine, "app", &held).await;
    assert!(text.contains("200 OK") && text.contains("welcome"), "{text}");
    // Not asked again: not now, not by the next daemon, not in the next session.
    let bash = |host: &str| format!("timeout 20 bash -c '{}'", get(host, port));
    assert!(sh(&engine, "app", &bash("a.test")).await.out.contains("welcome"));
    let engine = house.reopen(engine).await;
    assert!(sh(&engine, "app", &bash("a.test")).await.out.contains("welcome"));
    engine.stop(&project(), &name("app"), Default::default(), None).await.expect("stopped");
    assert!(sh(&engine, "app", &bash("a.test")).await.out.contains("welcome"));
    let all = engine.approvals(&project(), &ApprovalFilter::default(), &Page::all());
    assert_eq!(all.expect("a list").items.len(), 1);
    // Another host is another question. A program that speaks HTTP gets the reason.
    let (denied, ()) = tokio::join!(async { sh(&engine, "app", &bash("b.test")).await }, async {
        let asked = pending(&engine).await;
        answer(&engine, &asked, ApprovalAnswer::Deny).await;
    });
    assert!(!denied.out.contains("welcome"), "{}", denied.out);
    let filter = ConnectionFilter { verdict: Some(Verdict::Denied), ..ConnectionFilter::default() };
    let listed = engine.connections(&project(), &name("app"), &filter, 100, None).await;
    let listed = listed.expect("the journal").items;
    let refused = listed.iter().find(|line| line.name.as_deref() == Some("b.test"));
    assert!(refused.is_some_and(|line| line.rule.contains("denied: seen")), "{listed:?}");
    // A name that was denied does not exist any more; there is no new question.
    assert!(!sh(&engine, "app", &bash("b.test")).await.out.contains("welcome"));
    let all = engine.approvals(&project(), &ApprovalFilter::default(), &Page::all());
    assert_eq!(all.expect("a list").items.len(), 2);
    engine.delete(&project(), &name("app"), Default::default(), None).await.expect("deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_about_a_host_outlives_the_daemon_and_the_program() {
    let mut house = house!();
    let (port, _came, _tasks) = server(&mut house).await;
    let engine = house.open().await;
    let mut create = small("app");
    create.patch.approvals = Some(Some(policy()));
    engine.create(&project(), create, None).await.expect("a sandbox");
    let held = detached(&engine, "app", &["bash", "-c", &get("a.test", port)]).await;
    let asked = pending(&engine).await;
    let engine = house.reopen(engine).await;
    assert_eq!(pending(&engine).await.id, asked.id, "it still waits");
    ended(&engine, "app", &held).await;
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    let again = sh(&engine, "app", &format!("timeout 20 bash -c '{}'", get("a.test", port))).await;
    assert!(again.out.contains("welcome"), "{} {}", again.out, again.err);
    engine.delete(&project(), &name("app"), Default::default(), None).await.expect("deleted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_is_paused_while_a_question_waits_and_woken_by_the_answer() {
    let test = "a_machine_is_paused_while_a_question_waits_and_woken_by_the_answer";
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => return skipped(test, &why),
    };
    let mut engine = house.open().await;
    let mut create = machine("m");
    create.patch.approvals = Some(Some(ApprovalPolicy::default()));
    engine.create(&project(), create, None).await.expect("a machine");
    let phase = async |engine: &Engine| {
        engine.get(&project(), &name("m")).await.expect("it is there").sandbox.phase()
    };
    let line = "x=kept; keep ask 'deploy?' >/dev/null 2>&1; echo \"$x $?\"";
    let mut answers =
        vec![(ApprovalAnswer::Approve, "kept 0\n"), (ApprovalAnswer::Deny, "kept 1\n")];
    for reopened in [false, true] {
        let asking = detached(&engine, "m", &["sh", "-c", line]).await;
        let asked = pending(&engine).await;
        until("it is paused", async || (phase(&engine).await == Phase::Paused).then_some(())).await;
        if reopened {
            engine = house.reopen(engine).await;
            assert_eq!(phase(&engine).await, Phase::Paused);
        }
        let (given, expected) = answers.remove(0);
        answer(&engine, &asked, given).await;
        let command = ended(&engine, "m", &asking).await;
        assert_eq!(command.exit_code, Some(0), "{command:?}");
        assert_eq!(said(&engine, "m", &asking).await, expected);
    }
    engine.delete(&project(), &name("m"), Default::default(), None).await.expect("deleted");
}
