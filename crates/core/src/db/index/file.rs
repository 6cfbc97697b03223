//! The file of an index: whether it can be used, and making another in its place.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sandkeep_types::error_chain;

use crate::db::stamp::Stamp;
use crate::db::{Db as _, DbError, DbResult, SqliteDb};

/// How many directories that were found in the place of the index are kept.
const KEPT: u32 = 100;

pub(super) enum UnusableIndex {
    /// It is not of this time; nothing is broken.
    Stale(String),
    Damaged(String),
}

/// Opens the existing file and checks whether it can be used.
pub(super) async fn usable(file: &Path) -> Result<SqliteDb, UnusableIndex> {
    let damaged = |error: DbError| UnusableIndex::Damaged(error_chain(&error));
    let is_file = fs::symlink_metadata(file).is_ok_and(|found| found.is_file());
    if !is_file {
        return Err(UnusableIndex::Damaged("it is not a file".to_owned()));
    }
    if fs::metadata(file).is_ok_and(|found| found.len() == 0) {
        return Err(UnusableIndex::Damaged("it is empty".to_owned()));
    }
    let db = SqliteDb::open(file).await.map_err(damaged)?;
    let checked = async {
        if db.is_fresh() {
            return Err(UnusableIndex::Stale("it is of another version".to_owned()));
        }
        db.check(file).await.map_err(damaged)?;
        let epoch = db.epoch().await.map_err(damaged)?;
        match Stamp::refuses(file, epoch.as_deref()) {
            Some(reason) => Err(UnusableIndex::Stale(reason.to_owned())),
            None => Ok(()),
        }
    };
    let checked = checked.await;
    match checked {
        Ok(()) => Ok(db),
        Err(refused) => {
            db.hang_up().await;
            Err(refused)
        }
    }
}

/// Begins the epoch of this opening. The stamp is on disk before anything changes in the index.
pub(super) async fn begin(file: &Path, db: &SqliteDb) -> Result<Stamp, String> {
    let stamp = Stamp::draw(file).map_err(|error| error.to_string())?;
    stamp.write(file).map_err(|error| error.to_string())?;
    db.set_epoch(&stamp.epoch).await.map_err(|error| error_chain(&error))?;
    Ok(stamp)
}

/// Makes an empty index in the place of an existing one, or in memory.
pub(super) async fn make(file: &Path) -> DbResult<(SqliteDb, Option<Stamp>)> {
    let made = async {
        clear_away(file).map_err(|error| error.to_string())?;
        let db = SqliteDb::open(file).await.map_err(|error| error_chain(&error))?;
        let stamp = Stamp::draw(file).map_err(|error| error.to_string())?;
        stamp.write(file).map_err(|error| error.to_string())?;
        Ok::<_, String>((db, Some(stamp)))
    };
    match made.await {
        Ok(made) => Ok(made),
        Err(error) => {
            tracing::warn!(error, "the index cannot be written; it is kept in memory");
            Ok((SqliteDb::in_memory().await?, None))
        }
    }
}

/// Removes an index. A directory in its place is not ours, and is moved.
pub(super) fn clear_away(file: &Path) -> io::Result<()> {
    for suffix in ["", "-wal", "-shm", "-journal"] {
        let mut name = file.as_os_str().to_owned();
        name.push(suffix);
        let path = PathBuf::from(name);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => {
                let aside = |count: u32| {
                    let mut name = path.as_os_str().to_owned();
                    name.push(format!(".unusable.{count}"));
                    PathBuf::from(name)
                };
                let free = (1..KEPT).map(aside).find(|to| fs::symlink_metadata(to).is_err());
                fs::rename(&path, free.ok_or(io::ErrorKind::AlreadyExists)?)?;
            }
            Ok(_) => fs::remove_file(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
