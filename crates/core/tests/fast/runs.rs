//! Runs on the fake host: the queue, work, recovery at every step, decisions, expiry.

use std::sync::Arc;
use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Acceptance, Caller, Clock, Engine, RunFilter};
use sandkeep_core::model::{
    AcceptRule, CommandState, KeyId, ProjectRuns, Run, RunCommand, RunDecision, RunEffect, RunId,
    RunPlace, RunSpec, RunStatus, Scope, Span,
};
use sandkeep_core::store::{Durability, Store};
use sandkeep_testkit::fake::{FakeHouse, ok, small};
use sandkeep_testkit::house::{name, project};

use super::engine::{FastClock, stop};

/// Asks until there is an answer. A macro, because closures that wait cannot be sent to another thread.
macro_rules! eventually {
    ($what:expr, $answer:expr) => {{
        let begun = std::time::Instant::now();
        loop {
            if let Some(answer) = $answer {
                break answer;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{} did not come about", $what);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }};
}

pub(super) fn caller() -> Caller {
    let key = KeyId::fresh();
    Caller { project: project(), scope: Scope::Admin, key, approve: true, until: None }
}

pub(super) fn spec(place: RunPlace, line: Option<&str>) -> RunSpec {
    let argv = |line: &str| line.split(' ').map(str::to_owned).collect();
    let on_accept = place.on_accept();
    RunSpec {
        place,
        command: line.map(|line| RunCommand { argv: argv(line), ..RunCommand::default() }),
        repository: "acme/api".to_owned(),
        owner: "ada".to_owned(),
        purpose: "a test".to_owned(),
        class: String::new(),
        priority: 0,
        approve: Vec::new(),
        approve_hosts: false,
        known_hosts: Vec::new(),
        approve_secrets: Vec::new(),
        spending: Vec::new(),
        on_accept,
        keep: Span::days(14),
        timeout: None,
        retries: 0,
        heartbeat: Span::seconds(60),
    }
}

pub(super) fn fork_of(sandbox: &str) -> RunPlace {
    RunPlace::Fork { sandbox: name(sandbox), name: None }
}

pub(super) fn existing(sandbox: &str) -> RunPlace {
    RunPlace::Existing { sandbox: name(sandbox) }
}

pub(super) async fn start(engine: &Engine, spec: RunSpec) -> RunId {
    engine.start_run(&caller(), spec).await.expect("it is queued").id
}

pub(super) fn run_of(engine: &Engine, id: &RunId) -> Run {
    engine.run(&project(), id).expect("it is there")
}

pub(super) async fn reaches(engine: &Engine, id: &RunId, status: RunStatus) -> Run {
    eventually!(&format!("{status:?}"), {
        let run = run_of(engine, id);
        let over = run.status().is_final() && run.status() != status;
        assert!(!over, "it is {:?}: {:?}", run.status(), run.why);
        // What follows from a status is done, too.
        let done = !matches!(run.pending, Some(RunEffect::Stop | RunEffect::Discard));
        (run.status() == status && done).then_some(run)
    })
}

/// A house with a stopped sandbox `app`, whose file `/a` is `one`.
pub(super) async fn house() -> (FakeHouse, Engine) {
    let house = FakeHouse::new();
    let engine = house.open().await;
    with_app(&engine).await;
    (house, engine)
}

pub(super) async fn with_app(engine: &Engine) {
    engine.create(&project(), small("app"), None).await.expect("it is made");
    ok(engine, "app", "write /a one").await;
    stop(engine, "app").await;
}

#[tokio::test]
async fn a_run_works_in_a_fork_is_reviewed_and_promoted() {
    let (house, engine) = house().await;
    let run = start(&engine, spec(fork_of("app"), Some("write /a two"))).await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let fork = ready.sandbox.clone().expect("a fork").name;
    assert!(ready.own && fork.as_str().starts_with("app-run-"), "{fork}");
    assert_eq!(ready.attempts.len(), 1);
    assert_eq!(ready.attempts[0].exit_code, Some(0));
    assert!(ready.usage.is_some_and(|usage| usage.active_cpu_ms > 0));
    assert_eq!(house.alive(), [], "its sandbox is stopped");
    let review = engine.review_run(&project(), &run).await.expect("a review");
    let tree = review.difference.expect("a difference").tree;
    assert_eq!((tree.counts.modified, tree.counts.added), (1, 0));
    assert!(review.current);
    assert_eq!(review.to, ready.last.clone().expect("a snapshot").to_string());
    assert_eq!(ok(&engine, "app", "cat /a").await, "one", "nothing is brought back yet");
    stop(&engine, "app").await;
    let accepted = engine.accept_run(&caller(), &run, Acceptance::default()).await;
    let (accepted, promoted) = accepted.expect("it is accepted");
    assert_eq!(accepted.status(), RunStatus::Accepted);
    assert_eq!(promoted.expect("a promotion").sandbox.name, name("app"));
    assert_eq!(ok(&engine, "app", "cat /a").await, "two");
    let twice = engine.accept_run(&caller(), &run, Acceptance::default()).await;
    assert_eq!(twice.expect_err("it was accepted").code(), "run_status");
    let late = engine.cancel_run(&project(), &run, String::new()).await;
    assert_eq!(late.expect_err("it is over").code(), "run_status");
    house.end(engine).await;
}

#[tokio::test]
async fn of_two_accepted_forks_of_one_origin_one_wins_and_the_other_is_merged() {
    let (house, engine) = house().await;
    let first = start(&engine, spec(fork_of("app"), Some("write /b first"))).await;
    let second = start(&engine, spec(fork_of("app"), Some("write /c second"))).await;
    for run in [&first, &second] {
        reaches(&engine, run, RunStatus::ReadyForReview).await;
    }
    let (ada, bob) = (caller(), caller());
    let (one, other) = tokio::join!(
        engine.accept_run(&ada, &first, Acceptance::default()),
        engine.accept_run(&bob, &second, Acceptance::default())
    );
    let (loser, error) = match (one, other) {
        (Ok(_), Err(error)) => (second, error),
        (Err(error), Ok(_)) => (first, error),
        both => panic!("one wins: {both:?}"),
    };
    assert_eq!(error.code(), "origin_moved_on");
    assert!(error.hint().expect("a hint").contains("keep merge"), "{:?}", error.hint());
    let waits = run_of(&engine, &loser);
    assert_eq!((waits.status(), waits.pending), (RunStatus::ReadyForReview, None));
    assert_eq!(waits.decision, None);
    let merge = Acceptance {
        how: Some(AcceptRule::Merge),
        comment: "by hand".to_owned(),
        ..Acceptance::default()
    };
    let (merged, _) = engine.accept_run(&caller(), &loser, merge).await.expect("it is merged");
    assert_eq!(merged.decision.expect("a decision").comment, "by hand");
    let both = (ok(&engine, "app", "cat /b").await, ok(&engine, "app", "cat /c").await);
    assert_eq!(both, ("first".to_owned(), "second".to_owned()));
    house.end(engine).await;
}

#[tokio::test]
async fn a_sandbox_that_changed_after_its_review_is_not_accepted() {
    let (house, engine) = house().await;
    let run = start(&engine, spec(fork_of("app"), Some("write /a two"))).await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let fork = ready.sandbox.expect("a fork").name;
    ok(&engine, fork.as_str(), "write /a three").await;
    let refused = engine.accept_run(&caller(), &run, Acceptance::default()).await;
    assert_eq!(refused.expect_err("it runs").code(), "run_changed");
    stop(&engine, fork.as_str()).await;
    let refused = engine.accept_run(&caller(), &run, Acceptance::default()).await;
    assert_eq!(refused.expect_err("it is another").code(), "run_changed");
    assert!(!engine.review_run(&project(), &run).await.expect("a review").current);
    engine.pin_run_again(&caller(), &run).await.expect("it is pinned");
    engine.accept_run(&caller(), &run, Acceptance::default()).await.expect("it is accepted");
    assert_eq!(ok(&engine, "app", "cat /a").await, "three");
    house.end(engine).await;
}

#[tokio::test]
async fn a_rejected_run_loses_its_sandbox_and_an_existing_one_stays() {
    let (house, engine) = house().await;
    let run = start(&engine, spec(fork_of("app"), Some("write /a two"))).await;
    let fork = reaches(&engine, &run, RunStatus::ReadyForReview).await.sandbox.expect("a fork");
    let rejected = engine.reject_run(&caller(), &run, "wrong".to_owned()).await.expect("rejected");
    assert_eq!(rejected.status(), RunStatus::Rejected);
    eventually!("the fork is gone", {
        engine.get(&project(), &fork.name).await.is_err().then_some(())
    });
    let run = start(&engine, spec(existing("app"), Some("write /a three"))).await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    assert!(!ready.own && ready.first.is_some() && ready.first != ready.last);
    let tree = engine.review_run(&project(), &run).await.expect("a review").difference;
    assert_eq!(tree.expect("a difference").tree.counts.modified, 1);
    engine.reject_run(&caller(), &run, String::new()).await.expect("rejected");
    assert_eq!(ok(&engine, "app", "cat /a").await, "three", "a rollback is somebody's decision");
    house.end(engine).await;
}

#[tokio::test]
async fn a_failed_command_is_started_again_as_often_as_asked() {
    let (house, engine) = house().await;
    let retried = RunSpec { retries: 1, ..spec(fork_of("app"), Some("exit 3")) };
    let run = start(&engine, retried).await;
    let failed = reaches(&engine, &run, RunStatus::Failed).await;
    assert_eq!(failed.attempts.len(), 2);
    assert_eq!(failed.why.as_deref(), Some("its command ended with 3"));
    assert_ne!(failed.attempts[0].command, failed.attempts[1].command);
    let fork = failed.sandbox.expect("its sandbox is kept").name;
    assert_eq!(ok(&engine, fork.as_str(), "cat /a").await, "one");
    // What cannot be started is not tried again.
    let run = start(&engine, RunSpec { retries: 5, ..spec(fork_of("app"), Some("nothing")) }).await;
    let failed = reaches(&engine, &run, RunStatus::Failed).await;
    assert_eq!(failed.attempts.len(), 1, "{failed:?}");
    assert!(failed.why.expect("a reason").contains("nothing"));
    house.end(engine).await;
}

#[tokio::test]
async fn a_run_that_takes_too_long_fails_and_one_that_is_cancelled_is_ended() {
    let (house, engine) = house().await;
    let timeout = Some(Span(1000));
    let slow = start(&engine, RunSpec { timeout, ..spec(fork_of("app"), Some("sleep")) }).await;
    let unwanted = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
    let working = eventually!("it works", {
        Some(run_of(&engine, &unwanted)).filter(|run| !run.attempts.is_empty())
    });
    engine
        .cancel_run(&project(), &unwanted, "changed my mind".to_owned())
        .await
        .expect("cancelled");
    let cancelled = reaches(&engine, &unwanted, RunStatus::Cancelled).await;
    assert_eq!(cancelled.why.as_deref(), Some("changed my mind"));
    let fork = working.sandbox.expect("a fork").name;
    let command = engine.command(&project(), &fork, &working.attempts[0].command).await;
    assert_ne!(command.expect("its record").state, CommandState::Running);
    let failed = reaches(&engine, &slow, RunStatus::Failed).await;
    assert_eq!(failed.why.as_deref(), Some("it took longer than 1s"));
    assert_eq!(house.alive(), [], "both sandboxes are stopped");
    house.end(engine).await;
}

#[tokio::test]
async fn the_queue_has_priorities_and_bounds() {
    let (house, engine) = house().await;
    let limits = ProjectRuns { running: 1, queued: 2, separate_approver: false };
    engine.set_project_runs(&project(), limits).await.expect("limits");
    let first = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
    reaches(&engine, &first, RunStatus::Running).await;
    let low = start(&engine, spec(fork_of("app"), Some("true"))).await;
    let high = start(&engine, RunSpec { priority: 5, ..spec(fork_of("app"), Some("sleep")) }).await;
    let full = engine.start_run(&caller(), spec(fork_of("app"), Some("true"))).await;
    assert_eq!(full.expect_err("the queue is full").code(), "too_many_runs");
    engine.cancel_run(&project(), &first, String::new()).await.expect("cancelled");
    reaches(&engine, &high, RunStatus::Running).await;
    assert_eq!(run_of(&engine, &low).status(), RunStatus::Queued);
    engine.cancel_run(&project(), &low, String::new()).await.expect("cancelled");
    assert_eq!(run_of(&engine, &low).pending, None, "nothing was begun");
    engine.cancel_run(&project(), &high, String::new()).await.expect("cancelled");
    let filter = RunFilter { statuses: vec![RunStatus::Cancelled], ..RunFilter::default() };
    let page = Page { limit: 2, ..Page::default() };
    let listed = engine.runs(&project(), &filter, &page).expect("a list");
    assert_eq!(listed.items.iter().map(|run| &run.id).collect::<Vec<_>>(), [&high, &low]);
    let page = Page { cursor: listed.next, ..page };
    let rest = engine.runs(&project(), &filter, &page).expect("the rest");
    assert_eq!((rest.items.len(), rest.next), (1, None));
    house.end(engine).await;
}

#[tokio::test]
async fn runs_in_one_existing_sandbox_work_one_after_the_other() {
    let (house, engine) = house().await;
    let first = start(&engine, spec(existing("app"), Some("sleep"))).await;
    reaches(&engine, &first, RunStatus::Running).await;
    let second = start(&engine, spec(existing("app"), Some("write /a two"))).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(run_of(&engine, &second).status(), RunStatus::Queued);
    engine.cancel_run(&project(), &first, String::new()).await.expect("cancelled");
    reaches(&engine, &second, RunStatus::ReadyForReview).await;
    house.end(engine).await;
}

#[tokio::test]
async fn a_run_in_a_fork_that_another_run_made_waits_for_it() {
    let (house, engine) = house().await;
    let first = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
    let working = eventually!("it works", {
        Some(run_of(&engine, &first)).filter(|run| !run.attempts.is_empty())
    });
    let fork = working.sandbox.expect("a fork").name;
    let second = start(&engine, spec(existing(fork.as_str()), Some("write /a two"))).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(run_of(&engine, &second).status(), RunStatus::Queued);
    engine.cancel_run(&project(), &first, String::new()).await.expect("cancelled");
    reaches(&engine, &second, RunStatus::ReadyForReview).await;
    house.end(engine).await;
}

#[tokio::test]
async fn a_fork_that_changed_after_the_decision_is_not_brought_back() {
    let (house, engine) = house().await;
    let run = start(&engine, spec(fork_of("app"), Some("write /a two"))).await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let fork = ready.sandbox.expect("a fork").name;
    ok(&engine, fork.as_str(), "write /a three").await;
    stop(&engine, fork.as_str()).await;
    // It was decided before that, and the daemon died before anything was done.
    let engine = died_earlier(&house, engine, &run, |run| {
        run.pending = Some(RunEffect::Accept);
        run.decision = Some(RunDecision {
            how: Some(AcceptRule::Promote),
            by: KeyId::fresh(),
            at: run.queued_at,
            comment: String::new(),
            discard: false,
        });
    })
    .await;
    let waits = eventually!("it is taken back", {
        Some(run_of(&engine, &run)).filter(|run| run.pending.is_none())
    });
    assert_eq!((waits.status(), waits.decision), (RunStatus::ReadyForReview, None));
    assert_eq!(ok(&engine, "app", "cat /a").await, "one");
    house.end(engine).await;
}

#[tokio::test]
async fn a_run_goes_on_under_the_next_daemon_and_its_command_is_started_once() {
    for house in [FakeHouse::new(), FakeHouse::on_disk()] {
        let engine = house.open_apart().await;
        let (run, command) = engine
            .run(|engine| async move {
                with_app(&engine).await;
                let run = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
                let command = eventually!(
                    "it runs",
                    async {
                        let found = run_of(&engine, &run);
                        let sandbox = found.sandbox?.name;
                        let attempt = found.attempts.first()?.command.clone();
                        let record = engine.command(&project(), &sandbox, &attempt).await.ok()?;
                        Some(record.id)
                    }
                    .await
                );
                (run, command)
            })
            .await;
        engine.kill();
        let engine = house.open().await;
        let found = run_of(&engine, &run);
        assert_eq!((found.status(), found.pending), (RunStatus::Running, Some(RunEffect::Work)));
        let fork = found.sandbox.expect("its fork").name;
        engine.signal(&project(), &fork, &command, 15).await.expect("it takes signals");
        let failed = reaches(&engine, &run, RunStatus::Failed).await;
        assert_eq!(failed.attempts.len(), 1, "it was not started twice");
        assert_eq!(failed.attempts[0].command, command);
        assert_eq!(failed.attempts[0].exit_code, Some(143));
        house.end(engine).await;
    }
}

#[tokio::test]
async fn after_a_power_cut_the_attempt_counts_as_failed() {
    let house = FakeHouse::on_disk();
    let engine = house.open_apart().await;
    let run = engine
        .run(|engine| async move {
            with_app(&engine).await;
            let run = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
            eventually!("it works", {
                Some(()).filter(|()| !run_of(&engine, &run).attempts.is_empty())
            });
            tokio::time::sleep(Duration::from_millis(100)).await;
            run
        })
        .await;
    engine.kill();
    house.lose_power();
    let engine = house.open().await;
    let failed = reaches(&engine, &run, RunStatus::Failed).await;
    let why = failed.why.expect("a reason");
    assert!(why.contains("lost") || why.contains("session ended"), "{why}");
    house.end(engine).await;
}

/// Ends an engine, changes the document of a run as if the daemon had died earlier, and opens the next.
async fn died_earlier(
    house: &FakeHouse,
    engine: Engine,
    id: &RunId,
    change: impl FnOnce(&mut Run),
) -> Engine {
    engine.shutdown().await;
    drop(engine);
    let store = loop {
        match Store::open(&house.data()) {
            Ok(store) => break store,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    let mut run: Run = store.read(&(project(), id.clone())).await.expect("its document");
    change(&mut run);
    store.write(&run, Durability::Synced).await.expect("it is written");
    drop(store);
    house.open().await
}

#[tokio::test]
async fn every_effect_is_completed_by_the_next_daemon() {
    let (house, engine) = house().await;
    let run = start(&engine, spec(fork_of("app"), Some("write /a two"))).await;
    let done = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let fork = done.sandbox.clone().expect("a fork");
    let text = serde_json::to_value(&done).expect("JSON");
    // As it was when its effect was on disk, and nothing else: `(status, effect, what is not known yet)`.
    let earlier = |status: &str, effect: &str, unknown: &[&str]| -> Run {
        let mut text = text.clone();
        text["status"] = status.into();
        text["pending"] = effect.into();
        for field in unknown {
            text[*field] = serde_json::Value::Null;
        }
        if unknown.contains(&"attempts") {
            text["attempts"] = serde_json::json!([]);
        }
        serde_json::from_value(text).expect("a run")
    };
    // Its fork is found again, not made twice.
    let prepare =
        earlier("running", "prepare", &["sandbox", "attempts", "last", "usage", "finished_at"]);
    let engine = died_earlier(&house, engine, &run, |run| *run = prepare).await;
    let again = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    assert_eq!(again.sandbox.as_ref().map(|there| &there.id), Some(&fork.id));
    assert_eq!(again.attempts.len(), 1);
    // An attempt whose session is over, and whose command is on record with its end.
    let work = earlier("running", "work", &["finished_at"]);
    let engine = died_earlier(&house, engine, &run, |run| {
        *run = work;
        run.attempts[0].ended_at = None;
        run.attempts[0].exit_code = None;
    })
    .await;
    let again = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    assert_eq!((again.attempts.len(), again.attempts[0].exit_code), (1, Some(0)));
    assert!(again.last.is_some());
    let pinned = again.last;
    let finish = earlier("running", "finish", &["last", "usage", "finished_at"]);
    let engine = died_earlier(&house, engine, &run, |run| *run = finish).await;
    let again = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    assert_eq!(again.last, pinned);
    // It was promoted, and the daemon died before it could say so; then, it was not.
    let (accepted, _) =
        engine.accept_run(&caller(), &run, Acceptance::default()).await.expect("accepted");
    let generation =
        engine.get(&project(), &name("app")).await.expect("it is there").sandbox.generation;
    let mut accept = earlier("ready_for_review", "accept", &[]);
    accept.decision = accepted.decision.clone();
    accept.last = accepted.last.clone();
    let engine = died_earlier(&house, engine, &run, |run| *run = accept).await;
    reaches(&engine, &run, RunStatus::Accepted).await;
    let origin = engine.get(&project(), &name("app")).await.expect("it is there").sandbox;
    assert_eq!(origin.generation, generation, "it was not promoted twice");
    let mut discard = accepted.clone();
    discard.pending = Some(RunEffect::Discard);
    let engine = died_earlier(&house, engine, &run, |run| *run = discard).await;
    eventually!("its fork is deleted", {
        engine.get(&project(), &fork.name).await.is_err().then_some(())
    });
    house.end(engine).await;
}

#[tokio::test]
async fn an_attempt_that_was_never_started_is_started_under_its_id() {
    let (house, engine) = house().await;
    let run = start(&engine, spec(fork_of("app"), None)).await;
    let working = eventually!("it is prepared", {
        Some(run_of(&engine, &run)).filter(|run| run.pending == Some(RunEffect::Work))
    });
    let fork = working.sandbox.expect("a fork").name;
    let opened = engine.start(&project(), &fork, None).await.expect("it starts");
    let session = opened.session.expect("a session").id;
    // As if a daemon had died between the record of the attempt and the start of its command.
    let command = sandkeep_core::model::CommandId::fresh();
    let attempt = sandkeep_core::model::RunAttempt {
        command: command.clone(),
        session,
        started_at: sandkeep_core::model::now(),
        waited_before_ms: 0,
        ended_at: None,
        exit_code: None,
        problem: None,
    };
    let engine = died_earlier(&house, engine, &run, |run| {
        run.spec.command = spec(fork_of("app"), Some("write /a two")).command;
        run.attempts.push(attempt);
    })
    .await;
    let ready = reaches(&engine, &run, RunStatus::ReadyForReview).await;
    assert_eq!(ready.attempts.len(), 1);
    let record = engine.command(&project(), &fork, &command).await.expect("its record");
    assert_eq!(record.exit_code, Some(0));
    house.end(engine).await;
}

#[tokio::test]
async fn a_damaged_document_costs_that_run_alone() {
    let (house, engine) = house().await;
    let good = start(&engine, spec(fork_of("app"), Some("true"))).await;
    let bad = start(&engine, spec(fork_of("app"), Some("true"))).await;
    for run in [&good, &bad] {
        reaches(&engine, run, RunStatus::ReadyForReview).await;
    }
    engine.shutdown().await;
    drop(engine);
    let path = house.data().join(format!("runs/{}/{bad}.json", project()));
    std::fs::write(&path, "{\"format\": 5, \"nothing\": 1}").expect("our own file");
    let engine = house.open().await;
    assert_eq!(run_of(&engine, &good).status(), RunStatus::ReadyForReview);
    assert_eq!(engine.run(&project(), &bad).expect_err("it does not read").code(), "run_not_found");
    let damage = engine.damage();
    assert!(damage.iter().any(|one| one.subject.contains(bad.as_str())), "{damage:?}");
    house.end(engine).await;
}

#[tokio::test]
async fn a_harness_drives_a_run_as_long_as_it_is_heard_of() {
    let (house, engine) = house().await;
    let heartbeat = Span(1000);
    let run = start(&engine, RunSpec { heartbeat, ..spec(fork_of("app"), None) }).await;
    let working = eventually!("it is prepared", {
        Some(run_of(&engine, &run)).filter(|run| run.pending == Some(RunEffect::Work))
    });
    let fork = working.sandbox.expect("a fork").name;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let seen = engine.run_heartbeat(&project(), &run, Some(1.5)).await.expect("it is heard");
        assert_eq!((seen.status(), seen.cost), (RunStatus::Running, Some(1.5)));
    }
    ok(&engine, fork.as_str(), "write /a two").await;
    let finished = engine.finish_run(&project(), &run, None, Some(2.0)).await.expect("finished");
    assert_eq!(finished.cost, Some(2.0));
    reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let review = engine.review_run(&project(), &run).await.expect("a review");
    assert_eq!(review.commands.len(), 1);
    assert_eq!(review.commands[0].argv[0], "write");
    let silent = start(&engine, RunSpec { heartbeat, ..spec(fork_of("app"), None) }).await;
    let failed = reaches(&engine, &silent, RunStatus::Failed).await;
    assert_eq!(failed.why.as_deref(), Some("its harness was not heard of for 1s"));
    let kept = failed.sandbox.expect("its sandbox is kept").name;
    assert_eq!(ok(&engine, kept.as_str(), "cat /a").await, "one");
    let by_server = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
    let refused = engine.run_heartbeat(&project(), &by_server, None).await;
    assert_eq!(refused.expect_err("no harness").code(), "run_status");
    engine.cancel_run(&project(), &by_server, String::new()).await.expect("cancelled");
    house.end(engine).await;
}

#[tokio::test]
async fn what_nobody_reviews_expires_with_notice() {
    let mut house = FakeHouse::new();
    let clock = Arc::new(FastClock::default());
    house.settings.clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let engine = house.open().await;
    with_app(&engine).await;
    let keep = Span::days(10);
    let run = start(&engine, RunSpec { keep, ..spec(fork_of("app"), Some("write /a two")) }).await;
    let fork =
        reaches(&engine, &run, RunStatus::ReadyForReview).await.sandbox.expect("a fork").name;
    clock.forward(Duration::from_secs(9 * 24 * 3600 + 60));
    eventually!("its expiry is announced", run_of(&engine, &run).noticed.then_some(()));
    assert_eq!(run_of(&engine, &run).status(), RunStatus::ReadyForReview);
    clock.forward(Duration::from_secs(24 * 3600));
    let expired = reaches(&engine, &run, RunStatus::Expired).await;
    assert_eq!(expired.why.as_deref(), Some("nobody reviewed it in time"));
    assert!(engine.get(&project(), &fork).await.is_err(), "its fork is gone");
    house.end(engine).await;
}

pub(super) use eventually;
