//! The SQLite index keeps the contract of every index.

use sandkeep_core::db::{Db as _, DbError, MirroredDb, SqliteDb};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::tree::SmallDisk;
use sqlx::{Connection as _, SqliteConnection};

#[tokio::test]
async fn sqlite_keeps_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("index.sqlite");
    let db = SqliteDb::open(&file).await.unwrap();
    assert!(db.is_fresh());
    sandkeep_testkit::db::db_contract(&db).await;
    drop(db);
    assert!(
        !SqliteDb::open(&file).await.unwrap().is_fresh(),
        "what was filled is not filled again"
    );
}

async fn mirrored(file: &std::path::Path) -> MirroredDb {
    let disk = SqliteDb::open(file).await.expect("an index");
    MirroredDb::new(std::sync::Arc::new(disk)).await.expect("an index in memory")
}

#[tokio::test]
async fn one_with_memory_in_front_keeps_the_contract_and_finds_all_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("index.sqlite");
    let db = mirrored(&file).await;
    assert!(db.is_fresh());
    sandkeep_testkit::db::db_contract(&db).await;
    let all = sandkeep_core::db::Page::all();
    let filter = sandkeep_core::db::Filter::default();
    let before = db.sandboxes(None, &filter, &all).await.unwrap().items;
    db.close().await;
    drop(db);
    let again = mirrored(&file).await;
    assert!(!again.is_fresh());
    assert_eq!(again.sandboxes(None, &filter, &all).await.unwrap().items, before);
}

#[tokio::test]
async fn a_file_of_another_version_is_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("index.sqlite");
    drop(SqliteDb::open(&file).await.unwrap());
    let mut raw = SqliteConnection::connect(&format!("sqlite://{}", file.display())).await.unwrap();
    sqlx::query("PRAGMA user_version = 9999").execute(&mut raw).await.unwrap();
    raw.close().await.unwrap();
    assert!(SqliteDb::open(&file).await.unwrap().is_fresh());
}

#[tokio::test]
async fn a_full_disk_is_named() {
    let test = "a_full_disk_is_named";
    let dir = tempfile::tempdir().expect("a directory");
    let disk = match SmallDisk::mount(&dir.path().join("small"), 1 << 20) {
        Ok(disk) => disk,
        Err(why) => return skipped(test, &why.to_string()),
    };
    let db = SqliteDb::open(&dir.path().join("small/index.sqlite")).await.expect("an index");
    let filled = async {
        for number in 0..100_000 {
            let mut large = sandkeep_testkit::db::sandbox("p", &format!("box-{number}"));
            large.config.purpose = "x".repeat(4096);
            db.put_sandbox(&large).await?;
        }
        Ok::<_, DbError>(())
    };
    let refused = filled.await.expect_err("there is an end to it");
    assert!(matches!(refused, DbError::Full { .. }), "{refused:?}");
    let kind = sandkeep_core::engine::Error::from(refused).kind();
    assert_eq!(kind, sandkeep_core::engine::ErrorKind::Exhausted);
    db.close().await;
    drop(disk);
}
