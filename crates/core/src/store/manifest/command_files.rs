//! The records and logs of a sandbox's commands, as files: what they take, and how many go at once.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::model::{CommandId, SandboxId};
use crate::store::manifest::{list, sync_parent};
use crate::store::{Result, Store, blocking, io_error};

/// What is younger may be of a command whose record is being written.
const YOUNG: Duration = Duration::from_secs(60);

/// What the files of one command take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommandFiles {
    /// Disk space: blocks.
    pub bytes: u64,
    /// Whether none of them was changed in the last minute.
    pub settled: bool,
}

impl Store {
    /// What the files of a sandbox's commands take, by command. Files that are of no command are left out.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](crate::store::StoreError::Io) when they cannot be listed.
    pub async fn command_files(
        &self,
        sandbox: &SandboxId,
    ) -> Result<HashMap<CommandId, CommandFiles>> {
        let dir = self.commands_dir(sandbox);
        blocking(move || {
            let mut all: HashMap<CommandId, CommandFiles> = HashMap::new();
            let young = SystemTime::now().checked_sub(YOUNG);
            for path in list(&dir)? {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                let Some(Ok(id)) = name.split('.').next().map(str::parse::<CommandId>) else {
                    continue;
                };
                let metadata = match fs::symlink_metadata(&path) {
                    Ok(metadata) => metadata,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(io_error("stat", &path)(error)),
                };
                let old = metadata.modified().ok().zip(young).is_some_and(|(at, young)| at < young);
                let files = all.entry(id).or_insert(CommandFiles { bytes: 0, settled: true });
                files.bytes += metadata.blocks() * 512;
                files.settled &= old;
            }
            Ok(all)
        })
        .await
    }

    /// What the files of one command take. Asks for those that a command can have, whatever else is in the directory.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError`](crate::store::StoreError) when the disk does not answer.
    pub async fn files_of_command(&self, sandbox: &SandboxId, id: &CommandId) -> Result<u64> {
        let mut paths = self.logs_of(sandbox, id).to_vec();
        paths.push(self.record_of(sandbox, id));
        blocking(move || {
            let sizes = paths.iter().filter_map(|path| fs::symlink_metadata(path).ok());
            Ok(sizes.map(|metadata| metadata.blocks() * 512).sum())
        })
        .await
    }

    /// Removes the records and logs of commands. Those that are gone already are no error; the directory is synced once.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](crate::store::StoreError::Io); some of them may be left then.
    pub async fn remove_commands(&self, sandbox: &SandboxId, ids: &[CommandId]) -> Result<()> {
        let (store, sandbox, ids) = (self.clone(), sandbox.clone(), ids.to_vec());
        blocking(move || {
            for id in &ids {
                for log in store.logs_of(&sandbox, id) {
                    match fs::remove_file(&log) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => {
                            return Err(io_error("remove", &log)(error));
                        }
                        _ => {}
                    }
                }
                // The record goes last: a log without one would belong to no command.
                store.unlink(&store.record_of(&sandbox, id))?;
            }
            sync_parent(&store.commands_dir(&sandbox).join("x"))
        })
        .await
    }

    fn commands_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.data_dir().join("sandboxes").join(sandbox.as_str()).join("commands")
    }

    fn logs_of(&self, sandbox: &SandboxId, id: &CommandId) -> [PathBuf; 4] {
        ["log", "log.mid", "log.tail", "changes"]
            .map(|ending| self.commands_dir(sandbox).join(format!("{id}.{ending}")))
    }

    fn record_of(&self, sandbox: &SandboxId, id: &CommandId) -> PathBuf {
        self.commands_dir(sandbox).join(format!("{id}.json"))
    }
}
