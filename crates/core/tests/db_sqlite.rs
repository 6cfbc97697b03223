//! The SQLite index keeps the contract of every index.

use sandkeep_core::db::{Db as _, SqliteDb};
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
