//! What waits for an approval on the fake host: spending limits, suspended sandboxes; and what runs
//! keep.

use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{ApprovalFilter, Engine, Exec, SetSecret};
use sandkeep_core::model::{
    Approval, ApprovalAnswer, ApprovalPolicy, ApprovalStatus, ApprovalSubject, Inject, InjectInto,
    MachineKey, Patch, Run, RunCommand, RunEffect, RunId, RunSpec, RunStatus, SecretName,
    SpendingKind, SpendingLimit,
};
use sandkeep_proto::ask::{AskLine, InsideAnswer};
use sandkeep_testkit::fake::{FakeHouse, machine_of, ok, small};
use sandkeep_testkit::house::{name, project};

use super::engine::stop;
use super::runs::{
    caller, eventually, existing, fork_of, house, reaches, run_of, spec, start, with_app,
};

async fn pending(engine: &Engine) -> Approval {
    eventually!("an approval", {
        let status = Some(ApprovalStatus::Pending);
        let filter = ApprovalFilter { status, ..ApprovalFilter::default() };
        engine.approvals(&project(), &filter, &Page::all()).expect("a list").items.pop()
    })
}

async fn answer(engine: &Engine, approval: &Approval, answer: ApprovalAnswer) {
    let answered = engine.answer_approval(&caller(), &approval.id, answer, String::new()).await;
    answered.expect("it is answered");
}

fn cpu(limit: f64, step: Option<f64>) -> Vec<SpendingLimit> {
    vec![SpendingLimit { what: SpendingKind::Cpu, limit, step }]
}

/// A run that sleeps in a fork, once it works.
async fn asleep(engine: &Engine, spending: Vec<SpendingLimit>) -> (RunId, MachineKey) {
    let run = start(engine, RunSpec { spending, ..spec(fork_of("app"), Some("sleep")) }).await;
    let working: Run = eventually!("it works", {
        Some(run_of(engine, &run)).filter(|run| !run.attempts.is_empty())
    });
    (run, machine_of(&working.sandbox.expect("a fork").id))
}

#[tokio::test]
async fn a_run_at_its_spending_limit_stands_still_until_more_is_approved() {
    let (house, engine) = house().await;
    let (run, machine) = asleep(&engine, cpu(60.0, Some(30.0))).await;
    house.use_cpu(&machine, Duration::from_secs(61));
    let asked = pending(&engine).await;
    assert_eq!(asked.subject, ApprovalSubject::Spending);
    assert_eq!(asked.target.as_deref(), Some("cpu/0"));
    assert!(asked.question.ends_with("CPU time: 61s of 1m used, 30s more"), "{}", asked.question);
    reaches(&engine, &run, RunStatus::WaitingForApproval).await;
    eventually!("it is frozen", house.is_frozen(&machine).then_some(()));
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    reaches(&engine, &run, RunStatus::Running).await;
    eventually!("it goes on", (!house.is_frozen(&machine)).then_some(()));
    let now = eventually!("it is raised", {
        Some(run_of(&engine, &run)).filter(|run| !run.raised.is_empty())
    });
    let allowed = now.allowed(&now.spec.spending[0]);
    assert!((allowed - 90.0).abs() < 0.01, "{allowed}");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(run_of(&engine, &run).status(), RunStatus::Running, "nobody is asked twice");
    house.use_cpu(&machine, Duration::from_secs(95));
    let asked = pending(&engine).await;
    assert_eq!(asked.target.as_deref(), Some("cpu/1"));
    answer(&engine, &asked, ApprovalAnswer::Deny).await;
    let failed = reaches(&engine, &run, RunStatus::Failed).await;
    assert!(failed.why.as_deref().is_some_and(|why| why.contains("CPU time")), "{:?}", failed.why);
    assert!(failed.last.is_some(), "its state is kept");
    assert_eq!(house.alive(), []);
    house.end(engine).await;
}

#[tokio::test]
async fn what_a_sandbox_used_before_a_run_is_not_the_runs() {
    let (house, engine) = house().await;
    ok(&engine, "app", "write /b two").await;
    let app = engine.get(&project(), &name("app")).await.expect("it runs").sandbox;
    let machine = machine_of(&app.id);
    house.use_cpu(&machine, Duration::from_secs(500));
    let spec = RunSpec { spending: cpu(60.0, None), ..spec(existing("app"), Some("sleep")) };
    let run = start(&engine, spec).await;
    eventually!("it works", (!run_of(&engine, &run).attempts.is_empty()).then_some(()));
    house.use_cpu(&machine, Duration::from_secs(530));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(run_of(&engine, &run).status(), RunStatus::Running);
    house.use_cpu(&machine, Duration::from_secs(561));
    let asked = pending(&engine).await;
    assert!(asked.question.contains("61s of 1m used"), "{}", asked.question);
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    let ended = reaches(&engine, &run, RunStatus::Cancelled).await;
    assert_eq!(ended.usage.map(|usage| usage.active_cpu_ms), Some(61_000));
    house.end(engine).await;
}

#[tokio::test]
async fn a_limit_of_cost_counts_what_the_harness_says() {
    let (house, engine) = house().await;
    let spending = vec![SpendingLimit { what: SpendingKind::Cost, limit: 5.0, step: None }];
    let run = start(&engine, RunSpec { spending, ..spec(fork_of("app"), None) }).await;
    eventually!("it is prepared", {
        Some(()).filter(|()| run_of(&engine, &run).pending == Some(RunEffect::Work))
    });
    engine.run_heartbeat(&project(), &run, Some(4.9)).await.expect("it is heard");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(run_of(&engine, &run).status(), RunStatus::Running);
    engine.run_heartbeat(&project(), &run, Some(5.0)).await.expect("it is heard");
    let asked = pending(&engine).await;
    assert!(asked.question.contains("5 of 5 used, 5 more"), "{}", asked.question);
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    reaches(&engine, &run, RunStatus::Running).await;
    engine.finish_run(&project(), &run, None, None).await.expect("finished");
    reaches(&engine, &run, RunStatus::ReadyForReview).await;
    for bad in [cpu(0.0, None), cpu(1.0, Some(-1.0)), [cpu(1.0, None), cpu(2.0, None)].concat()] {
        let spec = RunSpec { spending: bad, ..spec(fork_of("app"), None) };
        assert_eq!(
            engine.start_run(&caller(), spec).await.expect_err("no limit").code(),
            "invalid"
        );
    }
    house.end(engine).await;
}

#[tokio::test]
async fn an_answer_that_a_daemon_died_over_raises_a_limit_once() {
    let house = FakeHouse::new();
    let engine = house.open_apart().await;
    let host = std::sync::Arc::clone(house.host());
    let (run, machine) = engine
        .run(|engine| async move {
            with_app(&engine).await;
            let (run, machine) = asleep(&engine, cpu(60.0, None)).await;
            host.use_cpu(&machine, Duration::from_secs(61));
            let asked = pending(&engine).await;
            eventually!("it is frozen", host.is_frozen(&machine).then_some(()));
            answer(&engine, &asked, ApprovalAnswer::Approve).await;
            (run, machine)
        })
        .await;
    engine.kill();
    let engine = house.open().await;
    eventually!("it goes on", (!house.is_frozen(&machine)).then_some(()));
    let now = eventually!("it is raised", {
        Some(run_of(&engine, &run)).filter(|run| !run.raised.is_empty())
    });
    assert_eq!(now.raised.get(&SpendingKind::Cpu), Some(&1));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(run_of(&engine, &run).raised, now.raised);
    assert_eq!(engine.approvals_of_run(&now).len(), 1);
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    reaches(&engine, &run, RunStatus::Cancelled).await;
    house.end(engine).await;
}

#[tokio::test]
async fn a_sandbox_stands_still_while_a_question_waits_and_any_call_has_it_go_on() {
    let (house, engine) = house().await;
    let (run, machine) = asleep(&engine, Vec::new()).await;
    let fork = run_of(&engine, &run).sandbox.expect("a fork").name;
    let question = AskLine { question: "deploy to prod?".to_owned(), ..AskLine::default() };
    house.ask(&machine, "1", question);
    let asked = pending(&engine).await;
    eventually!("it is frozen", house.is_frozen(&machine).then_some(()));
    // Somebody looks into it, and goes again.
    assert_eq!(ok(&engine, fork.as_str(), "cat /a").await, "one");
    eventually!("it is frozen again", house.is_frozen(&machine).then_some(()));
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    let heard = eventually!("the answer is heard", house.answers(&machine).pop());
    assert_eq!(heard.1, InsideAnswer::Approved);
    assert!(!house.is_frozen(&machine));
    // Stopped while it is suspended.
    let question = AskLine { question: "really?".to_owned(), ..AskLine::default() };
    house.ask(&machine, "2", question);
    pending(&engine).await;
    eventually!("it is frozen", house.is_frozen(&machine).then_some(()));
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    reaches(&engine, &run, RunStatus::Cancelled).await;
    assert_eq!(house.alive(), []);
    house.end(engine).await;
}

#[tokio::test]
async fn a_daemon_that_ends_leaves_nothing_frozen() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    with_app(&engine).await;
    let (run, machine) = asleep(&engine, Vec::new()).await;
    let question = AskLine { question: "deploy?".to_owned(), ..AskLine::default() };
    house.ask(&machine, "1", question);
    pending(&engine).await;
    eventually!("it is frozen", house.is_frozen(&machine).then_some(()));
    engine.shutdown().await;
    drop(engine);
    assert!(!house.is_frozen(&machine));
    let engine = house.open().await;
    assert_eq!(pending(&engine).await.run.as_ref(), Some(&run), "it still waits");
    eventually!("it is frozen again", house.is_frozen(&machine).then_some(()));
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    reaches(&engine, &run, RunStatus::Cancelled).await;
    house.end(engine).await;
}

#[tokio::test]
async fn a_project_is_not_deleted_while_its_runs_work() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let other = name("other");
    engine.create_project(other.clone()).await.expect("a project");
    let boss = sandkeep_core::engine::Caller { project: other.clone(), ..caller() };
    let place =
        sandkeep_core::model::RunPlace::Fresh { image: Some("small".to_owned()), name: None };
    let run = engine.start_run(&boss, spec(place, Some("sleep"))).await.expect("it is queued").id;
    let refused = engine.delete_project(&other).await.expect_err("a run is queued");
    assert_eq!(refused.code(), "project_in_use");
    assert!(refused.to_string().contains("1 runs"), "{refused}");
    let now = || engine.run(&other, &run).expect("it is there");
    eventually!("it works", (!now().attempts.is_empty()).then_some(()));
    let refused = engine.delete_project(&other).await.expect_err("a run works");
    assert_eq!(refused.code(), "project_in_use");
    engine.cancel_run(&other, &run, String::new()).await.expect("cancelled");
    eventually!("it is over", now().pending.is_none().then_some(()));
    let sandbox = now().sandbox.expect("its own").name;
    engine.delete(&other, &sandbox, Default::default(), None).await.expect("deleted");
    engine.delete_project(&other).await.expect("nothing works there");
    let late = engine.start_run(&boss, spec(existing("app"), None)).await;
    assert!(late.is_err(), "there is no such project");
    let left = std::fs::read_dir(house.data().join("runs/other")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "its runs are gone");
    house.end(engine).await;
}

#[tokio::test]
async fn texts_of_runs_that_are_over_are_read_from_disk() {
    let (house, engine) = house().await;
    let long = "x".repeat(5000);
    let mut wanted = spec(fork_of("app"), Some("write /a two"));
    if let Some(command) = &mut wanted.command {
        command.env.insert("LONG".to_owned(), long.clone());
    }
    let run = start(&engine, wanted.clone()).await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    assert_eq!(ready.spec.command, Some(RunCommand::default()), "memory has no use for it");
    let whole = engine.whole_runs(vec![ready]).await.pop().expect("one");
    assert_eq!(whole.spec, wanted);
    // A change of what is only partly in memory loses nothing.
    engine.reject_run(&caller(), &run, String::new()).await.expect("rejected");
    let rejected = reaches(&engine, &run, RunStatus::Rejected).await;
    let whole = engine.whole_runs(vec![rejected]).await.pop().expect("one");
    assert_eq!(whole.spec, wanted);
    engine.shutdown().await;
    drop(engine);
    let engine = house.open().await;
    let whole = engine.whole_runs(vec![run_of(&engine, &run)]).await.pop().expect("one");
    assert_eq!(whole.spec, wanted);
    let mut big = wanted;
    if let Some(command) = &mut big.command {
        command.env.insert("LONG".to_owned(), "x".repeat(70_000));
    }
    assert_eq!(engine.start_run(&caller(), big).await.expect_err("too long").code(), "invalid");
    house.end(engine).await;
}

#[tokio::test]
async fn the_first_snapshot_of_a_run_stays_as_long_as_it_can_be_reviewed() {
    let (house, engine) = house().await;
    let patch = Patch { keep_last: Some(Some(1)), delete_evicted: Some(true), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.expect("changed");
    let run = start(&engine, spec(fork_of("app"), Some("write /a two"))).await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let first = ready.first.expect("a first snapshot");
    for text in ["three", "four", "five"] {
        ok(&engine, "app", &format!("write /a {text}")).await;
        stop(&engine, "app").await;
    }
    assert!(engine.snapshot(&project(), &first).await.is_ok(), "a review needs it");
    let review = engine.review_run(&project(), &run).await.expect("a review");
    assert_eq!(review.difference.expect("a difference").tree.counts.modified, 1);
    engine.reject_run(&caller(), &run, String::new()).await.expect("rejected");
    reaches(&engine, &run, RunStatus::Rejected).await;
    ok(&engine, "app", "write /a six").await;
    stop(&engine, "app").await;
    assert!(engine.snapshot(&project(), &first).await.is_err(), "nobody needs it any more");
    house.end(engine).await;
}

#[tokio::test]
async fn limits_of_what_is_held_are_checked() {
    let (house, engine) = house().await;
    for spec in [
        RunSpec { known_hosts: vec!["http://x".to_owned()], ..spec(fork_of("app"), None) },
        RunSpec { approve_secrets: vec!["A-B".to_owned()], ..spec(fork_of("app"), None) },
    ] {
        assert_eq!(engine.start_run(&caller(), spec).await.expect_err("bad").code(), "invalid");
    }
    house.end(engine).await;
}

#[tokio::test]
async fn a_command_that_is_given_a_held_secret_waits() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let secret: SecretName = "DEPLOY_KEY".parse().expect("a name");
    let value = "a-value-nobody-sees".to_owned().into();
    let set = SetSecret { value, hosts: None, places: None, tags: None };
    engine.set_secret(&project(), secret.clone(), set).await.expect("it is set");
    let mut create = small("app");
    create.patch.approvals = Some(Some(ApprovalPolicy {
        secrets: vec![secret.to_string()],
        ..ApprovalPolicy::default()
    }));
    engine.create(&project(), create, None).await.expect("it is made");
    assert_eq!(ok(&engine, "app", "echo free").await, "free\n");
    let held = {
        let engine = engine.clone();
        tokio::spawn(async move {
            let argv = ["echo", "x"].map(str::to_owned).to_vec();
            let inject = vec![Inject { secret, into: InjectInto::Env("KEY".to_owned()) }];
            let exec = Exec { argv, inject, ..Exec::default() };
            engine.exec(&project(), &name("app"), exec).await.map(drop)
        })
    };
    let asked = pending(&engine).await;
    assert_eq!((asked.subject, asked.target.as_deref()), (ApprovalSubject::Secret, None));
    assert_eq!(asked.question, "give DEPLOY_KEY to `echo x`");
    answer(&engine, &asked, ApprovalAnswer::Deny).await;
    let refused = held.await.expect("no panic").expect_err("it was denied");
    assert_eq!(refused.code(), "not_approved");
    house.end(engine).await;
}
