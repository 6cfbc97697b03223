//! Approvals on the fake host: held commands, questions from outside and inside, sandboxes that are not as they were.

use std::sync::Arc;
use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Acceptance, ApprovalFilter, AskRequest, Engine, Exec, Fork};
use sandkeep_core::model::{
    Approval, ApprovalAnswer, ApprovalPolicy, ApprovalStatus, ApprovalSubject, Hook, Hooks, Patch,
    ProjectRuns, RunEffect, RunSpec, RunStatus, Span,
};
use sandkeep_proto::ask::{AskLine, InsideAnswer};
use sandkeep_testkit::fake::{FakeHouse, Script, machine_of, ok, small};
use sandkeep_testkit::house::{name, project};

use super::engine::stop;
use super::runs::{
    caller, eventually, existing, fork_of, house, reaches, run_of, spec, start, with_app,
};

async fn only_pending(engine: &Engine) -> Approval {
    eventually!("an approval", {
        let filter =
            ApprovalFilter { status: Some(ApprovalStatus::Pending), ..ApprovalFilter::default() };
        engine.approvals(&project(), &filter, &Page::all()).expect("a list").items.pop()
    })
}

async fn answer(engine: &Engine, approval: &Approval, answer: ApprovalAnswer) -> Approval {
    let comment = "looked at".to_owned();
    let answered = engine.answer_approval(&caller(), &approval.id, answer, comment).await;
    answered.expect("it is answered")
}

#[tokio::test]
async fn commands_that_match_a_pattern_are_held() {
    let (house, engine) = house().await;
    house.script(
        "git push origin",
        Script { code: Some(0), out: "pushed".into(), ..Script::default() },
    );
    let approve = vec!["git push*".to_owned()];
    let run = start(&engine, RunSpec { approve, ..spec(fork_of("app"), None) }).await;
    let working = eventually!("it is prepared", {
        Some(run_of(&engine, &run)).filter(|run| run.pending == Some(RunEffect::Work))
    });
    let fork = working.sandbox.expect("a fork").name;
    ok(&engine, fork.as_str(), "echo free").await;
    let push = || {
        let argv = ["git", "push", "origin"].map(str::to_owned).to_vec();
        let (engine, fork) = (engine.clone(), fork.clone());
        tokio::spawn(async move {
            let exec = Exec { argv, ..Exec::default() };
            engine.exec(&project(), &fork, exec).await.map(|started| started.command)
        })
    };
    let held = push();
    let asked = only_pending(&engine).await;
    assert_eq!((asked.subject, asked.run.as_ref()), (ApprovalSubject::Command, Some(&run)));
    assert_eq!(asked.question, "run `git push origin`");
    reaches(&engine, &run, RunStatus::WaitingForApproval).await;
    assert!(!held.is_finished());
    let denied = answer(&engine, &asked, ApprovalAnswer::Deny).await;
    assert!(denied.answered_by.is_some());
    let refused = held.await.expect("no panic").expect_err("it was denied");
    assert_eq!(refused.code(), "not_approved");
    assert!(refused.to_string().contains("looked at"), "{refused}");
    reaches(&engine, &run, RunStatus::Running).await;
    let held = push();
    let asked = only_pending(&engine).await;
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    held.await.expect("no panic").expect("it was approved");
    let twice =
        engine.answer_approval(&caller(), &asked.id, ApprovalAnswer::Deny, String::new()).await;
    assert_eq!(twice.expect_err("it was answered").code(), "already_answered");
    // A caller that leaves takes its question along.
    let held = push();
    let asked = only_pending(&engine).await;
    held.abort();
    eventually!("it is closed", {
        let now = engine.approval(&project(), &asked.id).expect("it is there");
        (now.status == ApprovalStatus::Expired).then_some(())
    });
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    reaches(&engine, &run, RunStatus::Cancelled).await;
    house.end(engine).await;
}

#[tokio::test]
async fn the_policy_of_a_sandbox_holds_without_a_run_and_goes_along_with_forks() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let policy = ApprovalPolicy {
        commands: vec!["write *".to_owned()],
        expires: Some(Span(1000)),
        ..ApprovalPolicy::default()
    };
    let mut create = small("app");
    create.patch.approvals = Some(Some(policy));
    engine.create(&project(), create, None).await.expect("it is made");
    ok(&engine, "app", "echo free").await;
    let fork = Fork { name: Some(name("copy")), ..Fork::default() };
    engine.fork(&project(), &name("app"), fork, None).await.expect("it is forked");
    let argv = ["write", "/a", "x"].map(str::to_owned).to_vec();
    let exec = Exec { argv, ..Exec::default() };
    let refused = engine.exec(&project(), &name("copy"), exec).await.expect_err("nobody answers");
    assert_eq!(refused.code(), "not_approved");
    assert!(refused.to_string().contains("nobody answered in time"), "{refused}");
    // A run is no way around it.
    let run = start(&engine, spec(existing("app"), Some("write /a x"))).await;
    let asked = only_pending(&engine).await;
    assert_eq!(asked.run.as_ref(), Some(&run));
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let bad = ApprovalPolicy { commands: vec![String::new()], ..ApprovalPolicy::default() };
    let patch = Patch { approvals: Some(Some(bad)), ..Patch::default() };
    let refused = engine.update(&project(), &name("app"), patch).await.expect_err("no pattern");
    assert!(refused.to_string().contains("approvals"), "{refused}");
    house.end(engine).await;
}

#[tokio::test]
async fn what_was_approved_for_one_sandbox_does_not_run_in_another() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let mut create = small("app");
    create.patch.approvals = Some(Some(ApprovalPolicy {
        commands: vec!["write *".to_owned()],
        ..ApprovalPolicy::default()
    }));
    engine.create(&project(), create, None).await.expect("it is made");
    let held = {
        let engine = engine.clone();
        tokio::spawn(async move {
            let argv = ["write", "/a", "x"].map(str::to_owned).to_vec();
            let exec = Exec { argv, ..Exec::default() };
            engine.exec(&project(), &name("app"), exec).await.map(|started| started.command)
        })
    };
    let asked = only_pending(&engine).await;
    engine.rename(&project(), &name("app"), name("before")).await.expect("it is renamed");
    engine.create(&project(), small("app"), None).await.expect("another is made");
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    let refused = held.await.expect("no panic").expect_err("it is another sandbox");
    assert_eq!(refused.code(), "sandbox_replaced");
    house.end(engine).await;
}

#[tokio::test]
async fn the_end_of_a_run_approves_nothing() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let mut create = small("app");
    create.patch.approvals = Some(Some(ApprovalPolicy {
        commands: vec!["write *".to_owned()],
        default: Some(ApprovalAnswer::Approve),
        ..ApprovalPolicy::default()
    }));
    engine.create(&project(), create, None).await.expect("it is made");
    let run = start(&engine, spec(existing("app"), None)).await;
    eventually!("it is prepared", {
        Some(()).filter(|()| run_of(&engine, &run).pending == Some(RunEffect::Work))
    });
    let held = {
        let engine = engine.clone();
        tokio::spawn(async move {
            let argv = ["write", "/a", "x"].map(str::to_owned).to_vec();
            let exec = Exec { argv, ..Exec::default() };
            engine.exec(&project(), &name("app"), exec).await.map(|started| started.command)
        })
    };
    let asked = only_pending(&engine).await;
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    let refused = held.await.expect("no panic").expect_err("nobody approved it");
    assert_eq!(refused.code(), "not_approved");
    let closed = engine.approval(&project(), &asked.id).expect("it is there");
    assert_eq!((closed.status, closed.answer()), (ApprovalStatus::Expired, None));
    house.end(engine).await;
}

#[tokio::test]
async fn who_asks_does_not_answer_where_the_project_wants_another() {
    let (house, engine) = house().await;
    let limits = ProjectRuns { separate_approver: true, ..ProjectRuns::default() };
    engine.set_project_runs(&project(), limits).await.expect("limits");
    let (ada, bob) = (caller(), caller());
    let run = engine.start_run(&ada, spec(fork_of("app"), None)).await.expect("queued").id;
    let working = eventually!("it is prepared", {
        Some(run_of(&engine, &run)).filter(|run| run.pending == Some(RunEffect::Work))
    });
    let fork = working.sandbox.expect("a fork").name;
    let request = AskRequest { question: "deploy?".to_owned(), ..AskRequest::default() };
    let asked = engine.ask_approval(&bob, &fork, request).await.expect("it is asked");
    for asker in [&ada, &bob] {
        let refused =
            engine.answer_approval(asker, &asked.id, ApprovalAnswer::Approve, String::new()).await;
        assert_eq!(refused.expect_err("not them").code(), "separate_approver");
    }
    answer(&engine, &asked, ApprovalAnswer::Approve).await;
    engine.finish_run(&project(), &run, None, None).await.expect("finished");
    reaches(&engine, &run, RunStatus::ReadyForReview).await;
    let refused = engine.accept_run(&ada, &run, Acceptance::default()).await;
    assert_eq!(refused.expect_err("not her").code(), "separate_approver");
    engine.accept_run(&bob, &run, Acceptance::default()).await.expect("he may");
    house.end(engine).await;
}

#[tokio::test]
async fn questions_expire_with_their_default_and_are_bounded() {
    let (house, engine) = house().await;
    let ask = async |default, expires| {
        let request = AskRequest {
            question: "go on?".to_owned(),
            default,
            expires: Some(expires),
            ..AskRequest::default()
        };
        engine.ask_approval(&caller(), &name("app"), request).await
    };
    let asked = ask(Some(ApprovalAnswer::Approve), Span(1000)).await.expect("it is asked");
    let ended = engine.approval_answered(&project(), &asked.id).await.expect("it ends");
    assert_eq!(
        (ended.status, ended.answer()),
        (ApprovalStatus::Expired, Some(ApprovalAnswer::Approve))
    );
    for _ in 0..64 {
        ask(None, Span::days(1)).await.expect("there is room");
    }
    assert_eq!(ask(None, Span::days(1)).await.expect_err("no room").code(), "too_many_approvals");
    for (question, expires) in [("", 60), ("a\nb", 60), ("x", 0), ("x", 31 * 24 * 3600)] {
        let request = AskRequest {
            question: question.to_owned(),
            expires: Some(Span::seconds(expires)),
            ..AskRequest::default()
        };
        let refused = engine.ask_approval(&caller(), &name("app"), request).await;
        assert_eq!(refused.expect_err(question).code(), "invalid");
    }
    house.end(engine).await;
}

#[tokio::test]
async fn a_question_from_inside_gets_its_answer_also_from_the_next_daemon() {
    let house = FakeHouse::new();
    let engine = house.open_apart().await;
    let (run, machine, first) = engine
        .run({
            let host = Arc::clone(house.host());
            |engine| async move {
                with_app(&engine).await;
                let run = start(&engine, spec(fork_of("app"), Some("sleep"))).await;
                let working = eventually!("it works", {
                    Some(run_of(&engine, &run)).filter(|run| !run.attempts.is_empty())
                });
                let machine = machine_of(&working.sandbox.expect("a fork").id);
                let asked =
                    AskLine { question: "deploy to prod?".to_owned(), ..AskLine::default() };
                host.ask(&machine, "1", asked.clone());
                let first = only_pending(&engine).await;
                assert_eq!(
                    (first.question.as_str(), &first.run),
                    ("deploy to prod?", &Some(run.clone()))
                );
                reaches(&engine, &run, RunStatus::WaitingForApproval).await;
                answer(&engine, &first, ApprovalAnswer::Approve).await;
                eventually!("it is heard inside", {
                    let told = host.answers(&machine);
                    (told == [("1".to_owned(), InsideAnswer::Approved, "looked at".to_owned())])
                        .then_some(())
                });
                reaches(&engine, &run, RunStatus::Running).await;
                host.ask(&machine, "2", asked);
                let second = only_pending(&engine).await;
                (run, machine, second)
            }
        })
        .await;
    engine.kill();
    let engine = house.open().await;
    let still = only_pending(&engine).await;
    assert_eq!(still.id, first.id, "it is not asked twice");
    answer(&engine, &still, ApprovalAnswer::Deny).await;
    eventually!("it is heard inside", {
        house.answers(&machine).get(1).filter(|told| told.1 == InsideAnswer::Denied).map(drop)
    });
    // A requester may leave.
    house.ask(&machine, "3", AskLine { question: "and now?".to_owned(), ..AskLine::default() });
    let third = only_pending(&engine).await;
    house.withdraw(&machine, "3");
    let closed = engine.approval_answered(&project(), &third.id).await.expect("it is closed");
    assert_eq!(closed.comment, "whoever asked is gone");
    engine.cancel_run(&project(), &run, String::new()).await.expect("cancelled");
    reaches(&engine, &run, RunStatus::Cancelled).await;
    house.end(engine).await;
}

#[tokio::test]
async fn a_run_waits_when_its_sandbox_is_not_as_it_was() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let mut create = small("app");
    let validate = Some(Hook { argv: vec!["cat".to_owned(), "/state".to_owned()], timeout: None });
    create.patch.hooks = Some(Hooks { validate, ..Hooks::default() });
    house.script("cat /state", Script { out: "clean".into(), code: Some(0), ..Script::default() });
    engine.create(&project(), create, None).await.expect("it is made");
    stop(&engine, "app").await;
    house.script("cat /state", Script { out: "dirty".into(), code: Some(0), ..Script::default() });
    for (decision, status) in [
        (ApprovalAnswer::Deny, RunStatus::Failed),
        (ApprovalAnswer::Approve, RunStatus::ReadyForReview),
    ] {
        let run = start(&engine, spec(existing("app"), Some("true"))).await;
        let asked = only_pending(&engine).await;
        assert_eq!(asked.subject, ApprovalSubject::Validation);
        assert!(asked.context.contains("clean") && asked.context.contains("dirty"), "{asked:?}");
        reaches(&engine, &run, RunStatus::WaitingForApproval).await;
        answer(&engine, &asked, decision).await;
        let ended = reaches(&engine, &run, status).await;
        assert_eq!(ended.attempts.len(), usize::from(decision == ApprovalAnswer::Approve));
    }
    house.end(engine).await;
}

#[tokio::test]
async fn a_repository_is_compared_with_what_it_was_at_the_last_stop() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let command = "sh -c cd \"$1\" && git rev-parse HEAD && git status --porcelain=v1 \
                   --untracked-files=all validate_git /srv/repo";
    let prints = |out: &str| Script { out: out.into(), code: Some(0), ..Script::default() };
    let validate_git = Some("/srv/repo".to_owned());
    let mut create = small("app");
    create.patch.hooks = Some(Hooks { validate_git, ..Hooks::default() });
    house.script(command, prints("1234abcd\n"));
    engine.create(&project(), create, None).await.expect("it is made");
    stop(&engine, "app").await;
    let same = engine.start(&project(), &name("app"), None).await.expect("it starts");
    assert_eq!(same.session.expect("a session").valid, Some(true));
    stop(&engine, "app").await;
    house.script(command, prints("1234abcd\n M src/main.rs\n"));
    let other = engine.start(&project(), &name("app"), None).await.expect("it starts");
    let session = other.session.expect("a session");
    assert_eq!(session.valid, Some(false));
    let problem = session.hooks[0].problem.as_deref().expect("what differs");
    assert!(problem.contains("M src/main.rs"), "{problem}");
    let hooks = Hooks { validate_git: Some("srv".to_owned()), ..Hooks::default() };
    let patch = Patch { hooks: Some(hooks), ..Patch::default() };
    let refused = engine.update(&project(), &name("app"), patch).await.expect_err("no path");
    assert!(refused.to_string().contains("validate_git"), "{refused}");
    house.end(engine).await;
}
