//! How many command records and logs a sandbox keeps.

use sandkeep_core::db::Page;
use sandkeep_core::engine::{CommandOutput, CommandRetention, CommandsKept, Engine};
use sandkeep_core::model::{CommandId, Size};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{detached, name, ok, printed, project, small, until};

async fn ids(engine: &Engine) -> Vec<CommandId> {
    let page = engine.commands(&project(), &name("app"), &Page::all()).await.expect("a list");
    page.items.into_iter().map(|command| command.id).collect()
}

async fn kept(engine: &Engine) -> CommandsKept {
    let sandbox = engine.get(&project(), &name("app")).await.expect("it is there").sandbox;
    engine.commands_kept(&sandbox.id).await.expect("measured")
}

#[tokio::test(flavor = "multi_thread")]
async fn those_that_ended_first_go_first_and_what_runs_stays() {
    let mut house = house!();
    house.settings.commands = CommandRetention { count: 10, bytes: Size(1 << 30) };
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("a sandbox");
    let running = detached(&engine, "app", &["sleep", "1000"]).await;
    let first = detached(&engine, "app", &["echo", "first"]).await;
    engine.wait(&project(), &name("app"), &first).await.expect("it ends");
    for number in 0..30 {
        assert_eq!(ok(&engine, "app", &format!("echo {number}")).await, format!("{number}\n"));
    }
    // The caller gets the answer before old ones are removed.
    let left = until("old commands are removed", async || {
        let left = ids(&engine).await;
        (left.len() <= 11).then_some(left)
    })
    .await;
    assert!(left.len() >= 8, "{}", left.len());
    assert!(left.contains(&running), "it runs");
    assert!(!left.contains(&first), "it ended first");
    let gone = engine.command(&project(), &name("app"), &first).await.expect_err("it is gone");
    assert_eq!(gone.code(), "command_not_found");
    let sandbox = engine.get(&project(), &name("app")).await.expect("it is there").sandbox;
    let dir = house.data().join("sandboxes").join(sandbox.id.as_str()).join("commands");
    let of_first = |dir: &std::path::Path| {
        let names = std::fs::read_dir(dir).expect("readable").flatten();
        names.filter(|entry| entry.file_name().to_string_lossy().contains(first.as_str())).count()
    };
    until("its files are gone", async || (of_first(&dir) == 0).then_some(())).await;
    // What is left reads, and the newest is the last that ran.
    let newest = left.iter().max().expect("some");
    assert_eq!(printed(&engine, "app", newest).await, b"29\n");
    // The count follows the removal.
    let counted = until("the count follows", async || {
        let counted = kept(&engine).await;
        (counted.count <= 11).then_some(counted)
    })
    .await;
    assert!(counted.bytes > 0, "{counted:?}");
    let usage = engine.usage(Some(&project())).await.expect("told");
    assert_eq!(usage.commands, kept(&engine).await.bytes);

    // A daemon that comes back measures what there is.
    let engine = house.reopen(engine).await;
    assert_eq!(kept(&engine).await.count, ids(&engine).await.len() as u64);
    engine.signal(&project(), &name("app"), &running, 9).await.expect("it still runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_take_so_much_and_no_more() {
    let mut house = house!();
    house.settings.commands = CommandRetention { count: 1_000, bytes: Size(4 << 20) };
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("a sandbox");
    for _ in 0..6 {
        ok(&engine, "app", "head -c 1000000 /dev/zero").await;
    }
    let within = until("logs are within bounds", async || {
        let kept = kept(&engine).await;
        // The last of them is counted a moment after its caller got its end.
        (kept.bytes <= 4 << 20 && kept.count <= 4).then_some(kept)
    })
    .await;
    assert!(within.count >= 2, "{within:?}");
    // One that is larger than the bound stays until another has ended.
    ok(&engine, "app", "head -c 6000000 /dev/zero").await;
    let left = until("the others are gone", async || {
        let left = ids(&engine).await;
        (left.len() == 1).then_some(left)
    })
    .await;
    assert_eq!(printed(&engine, "app", &left[0]).await.len(), 6_000_000);
    let mut log = engine.logs(&project(), &name("app"), &left[0], false).await.expect("a log");
    ok(&engine, "app", "true").await;
    until("it goes", async || (!ids(&engine).await.contains(&left[0])).then_some(())).await;
    // A reader gets a note of the gap, and the end.
    let mut last = None;
    while let Some(event) = log.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(CommandOutput::Exited(_))), "{last:?}");
}
