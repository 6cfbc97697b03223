//! Hints: what people can do about an error.

use super::{Error, ErrorKind, NoSuch};
use crate::db::DbError;
use crate::engine::records::lost_names::Lost;
use crate::guest::GuestError;
use crate::model::{Finding, FindingKind, Name};
use crate::secret::SealError;
use crate::store::StoreError;
use crate::store::image::ImageError;
use sandkeep_proto::link::Failure;

impl Error {
    /// What to do about it, for people.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NameTaken(name) => {
                format!("choose another name, or ask to get `{name}` if it exists (`keep create {name} --get`)")
            }
            Self::NoDriver { .. } => "name one of those; `keep doctor` shows what this host lacks for others".to_owned(),
            Self::BuildStep { error, .. } => error.hint()?,
            Self::TooManyBuilds { .. } => "wait until one of them has ended".to_owned(),
            Self::AbsentDriver { fix, .. } => fix.clone()?,
            Self::NoSandbox(NoSuch { trashed: None, .. }) => "`keep ls` lists what there is".to_owned(),
            Self::NoSandbox(NoSuch { name, trashed: Some(_) }) => {
                format!("`keep trash restore {name}` brings it back")
            }
            Self::Lost(Lost { id, .. }) => format!(
                "`keep doctor` says what is wrong with it; put `sandboxes/{id}/sandbox.json` back, or fork one of its snapshots \
                 (`keep snapshot ls`). Its name is free again when its snapshots are deleted and the directory `sandboxes/{id}` \
                 is moved away"
            ),
            Self::NotInTrash(_) => "`keep trash ls` lists what there is".to_owned(),
            Self::NoService { sandbox, .. } => format!("`keep service ls {sandbox}` lists what there is"),
            Self::NoSnapshot(_) => "`keep snapshot ls` lists what there is".to_owned(),
            Self::TooManyExports(_) => "try again when one of them has ended".to_owned(),
            Self::NoCommand { sandbox, .. } => format!("`keep commands {sandbox}` lists what was run"),
            Self::CommandEnded(_) | Self::StdinClosed(_) => {
                "`keep logs NAME COMMAND` shows what it printed; `keep ps NAME -a` lists ended commands".to_owned()
            }
            Self::NotRunning(name) => format!("start it with `keep start {name}`, or omit `if_running`"),
            Self::NoMemory { name, .. } => {
                format!("`keep stop {name}` keeps its files; stopped, it can change with `keep update {name} --driver microvm`")
            }
            Self::DriverInUse(name) => format!("`keep stop {name}` first"),
            Self::DrivesUnsaved { name, .. } => {
                format!("`keep rm {name}` tries again; `keep rm {name} --force` deletes it without recovering them")
            }
            Self::MemoryTooDeep(name) => format!("`keep pause {name}` or `keep stop {name}` once: either merges its captures"),
            Self::HasDrives(name) => {
                format!("`keep stop {name}` keeps its files, and those of its drives")
            }
            Self::HoldsMemory { name, .. } => {
                format!("`keep stop {name}` first: that keeps its files and discards its memory")
            }
            Self::NoLabel { name, .. } => format!("`keep snapshot ls {name}` lists labels"),
            Self::FilesNotReadable { .. } => {
                "stop the sandbox, or name `@saved` if its last snapshot was made by a stop".to_owned()
            }
            Self::NoOrigin { fork } => format!("`keep merge {fork} --into NAME` names the sandbox that gets the changes"),
            Self::OriginDeleted { fork, origin } => format!(
                "`keep trash restore {origin}` brings it back; or `keep rename {fork} {origin}` puts the fork in its place"
            ),
            Self::OriginMovedOn { origin, fork, .. } => format!(
                "`keep merge {fork}` brings in what the fork changed; `keep diff {fork}@base {origin}` shows what has changed there"
            ),
            Self::Unrelated { from, into } => format!(
                "exchange a patch instead: `keep diff {from}@base {from} --patch`, then `git apply` in `{into}`"
            ),
            Self::AncestorDeleted { .. } => "exchange a patch or a branch instead".to_owned(),
            Self::MergeConflicts { from, into, .. } => format!(
                "`keep merge {from} --into {into} --dry-run` lists all of them; `--conflicts keep` writes both versions, `--only GLOB` takes chosen paths"
            ),
            Self::NoRun(_) => "`keep runs ls` lists what there is".to_owned(),
            Self::RunStatus { run, .. } => format!("`keep runs show {run}` tells how it stands"),
            Self::ProjectRuns { .. } => {
                "cancel them with `keep runs cancel`, or wait until they are over".to_owned()
            }
            Self::RunBusy(_) => "look again in a moment".to_owned(),
            Self::RunChanged { run, .. } => format!(
                "`keep runs review {run} --again` pins what it is now; look at it before you accept it"
            ),
            Self::TooManyRuns { .. } => {
                "wait until some have started, or raise the limit with `keep project governance`".to_owned()
            }
            Self::NoApproval(_) => "`keep approvals ls --all` lists what there is".to_owned(),
            Self::SandboxReplaced(_) => {
                "what was approved was for the sandbox of that name at that time: start the command again".to_owned()
            }
            Self::ApprovalAnswered { approval, .. } => {
                format!("`keep approvals show {approval}` tells who answered")
            }
            Self::TooManyApprovals { .. } => "`keep approvals ls` lists those that wait".to_owned(),
            Self::NotApproved { approval, .. } => {
                format!("`keep approvals show {approval}` tells who answered, and why")
            }
            Self::SeparateApprover => "use the key of somebody else".to_owned(),
            Self::PrivateWebhook => "an admin can do it for the project, or give a public address".to_owned(),
            Self::WebhookAnswers => {
                "an admin may; `keep key create LABEL --scope write --approve` makes such a key for others".to_owned()
            }
            Self::AnswerLink(_) => {
                "answer with a key that may approve: `keep approvals approve`, or POST /v1/approvals/{id}/answer".to_owned()
            }
            Self::TooManyDeliveries(_) => "try again in a moment; `keep webhook show` lists the last deliveries".to_owned(),
            Self::Store(StoreError::DiffTooLarge { .. }) => "compare fewer paths: name files or directories".to_owned(),
            Self::Store(StoreError::ExportTooLarge { .. }) => {
                "start a sandbox from the snapshot, remove what makes it so large, and export that; or copy files out with `keep cp`".to_owned()
            }
            Self::Store(StoreError::Busy { .. }) => "try again in a moment".to_owned(),
            Self::Store(StoreError::OverLimit { .. }) => {
                "`keep update NAME --disk SIZE` gives the target a higher limit; `keep merge --only GLOB` takes chosen paths".to_owned()
            }
            Self::RecordChanged { .. } => "try again: the next attempt begins with the changed record".to_owned(),
            Self::Generation { .. } | Self::DriveGeneration { .. } => "somebody changed it meanwhile: look again, then decide".to_owned(),
            Self::NoDrive(_) => "`keep drive ls` lists what there is; `keep drive create` makes one".to_owned(),
            Self::DriveAttached { sandbox, .. } => {
                format!("one session writes to a drive at a time: stop `{sandbox}`, mount a snapshot of the drive, or fork it")
            }
            Self::DriveNotInitialised { writer: Some(writer), .. } => format!("`keep stop {writer}` ends its session"),
            Self::DriveNotInitialised { .. } => "mount it read-write in a sandbox first, and stop that".to_owned(),
            Self::SnapshotInUse { .. } => "delete those first, or roll them back to another snapshot".to_owned(),
            Self::Unresumable { offers, name, .. } if !offers.is_empty() => {
                let offers: Vec<String> = offers.iter().take(5).map(ToString::to_string).collect();
                format!("these snapshots are complete: {}; `keep rollback {name} <snapshot>` returns to one", offers.join(", "))
            }
            Self::SnapshotGone { name, .. } => {
                format!("`keep rollback {name} <snapshot>` returns to another snapshot; the sandbox never falls back to its image")
            }
            Self::Sealed { reason: SealError::OtherKey { .. }, .. } => {
                "start the server with the key it was sealed with, or set it again".to_owned()
            }
            Self::NoWebhook(_) => "`keep webhook ls` lists what there is".to_owned(),
            Self::NoSecret(_) => "`keep secret ls` lists what there is; `keep secret set` makes one".to_owned(),
            Self::Sealed { .. } => "set it again".to_owned(),
            Self::Guarded { name, findings, .. } => guarded_hint(name, findings),
            Self::TakenGuarded { from, into, .. } => format!(
                "remove these files in `{from}`, or take other paths with `keep merge {from} --into {into} --only GLOB`; \
                 the guard of `{into}` decides what it lets pass"
            ),
            Self::DriveConflicts { drive, .. } => format!(
                "choose another directory with `--to drive:{drive}:/DIR`, or fewer paths with `--only`"
            ),
            Self::DriveGuarded { from, .. } => format!(
                "remove these files in `{from}`, or choose other paths; the guard of `{from}` decides what it lets pass"
            ),
            Self::KeyReused(_) => "use a new key for a new request".to_owned(),
            Self::StartFailed { .. } => "its last snapshot is safe; see the daemon's log and `keep doctor`".to_owned(),
            Self::BadKey => "set SANDKEEP_KEY; `keep key create` makes a new one".to_owned(),
            Self::Store(_) | Self::Driver(_) if self.kind() == ErrorKind::Exhausted => {
                "delete sandboxes or snapshots (`keep usage` tells what takes up room); nothing was lost".to_owned()
            }
            Self::Store(StoreError::InDoubt { .. }) => {
                "replace these files by new ones or remove them inside the sandbox, then ask again; \
                 `keep stop --accept-doubtful` keeps them as they can be read now, \
                 `keep stop --discard` gives up what the session wrote; `keep doctor` tells more"
                    .to_owned()
            }
            Self::Store(error) if error.is_read_only() => {
                "the kernel makes a filesystem read-only when its disk fails: see the kernel's log (`dmesg`) and the disk, \
                 then mount it writable again"
                    .to_owned()
            }
            Self::Store(StoreError::Slow { .. }) | Self::Db(DbError::Slow { .. }) => {
                "the disk under the data directory hangs: see the kernel's log (`dmesg`) and the disk; \
                 what is being done goes on when it answers"
                    .to_owned()
            }
            Self::Store(StoreError::Io { .. }) => {
                "see the kernel's log (`dmesg`) and the disk under the data directory".to_owned()
            }
            Self::Store(StoreError::BadExport { .. } | StoreError::ExportLost { .. }) => {
                "its disk is kept: `keep stop` tries again, `keep stop --discard` gives up what the session wrote".to_owned()
            }
            Self::Image(ImageError::NotFound { .. }) => {
                "`keep image pull <reference>` or `keep image import <name> <file>` brings one here".to_owned()
            }
            Self::Image(ImageError::Denied { registry, .. } | ImageError::Credentials { registry, .. }) => {
                format!("`docker login {registry}` stores credentials where the daemon looks for them")
            }
            Self::Guest(GuestError::DiskLimit { .. }) => {
                "remove files inside, or `keep update NAME --disk SIZE` gives it a higher limit".to_owned()
            }
            Self::Guest(GuestError::Refused { kind: Failure::NoExecutable, .. }) => {
                "the first word must be a program inside the sandbox; for shell syntax use `sh -c '...'`".to_owned()
            }
            Self::Image(error) => image_hint(error)?,
            Self::Guest(GuestError::Refused { kind, .. }) => refused_hint(*kind)?.to_owned(),
            _ => return None,
        })
    }
}

fn image_hint(error: &ImageError) -> Option<String> {
    Some(match error {
        ImageError::Unreachable { registry, .. } => format!(
            "check the name and that this server's host reaches {registry} (network, DNS, proxy); without a network, \
             `docker save` elsewhere and `keep image import NAME FILE` bring an image here"
        ),
        ImageError::Unknown { .. } => {
            "check its name and tag; `docker login` on the server's host if it is private"
                .to_owned()
        }
        ImageError::NotAnImage { .. } => {
            "give a tar archive: of `docker save`, of an OCI layout, or of a root filesystem"
                .to_owned()
        }
        ImageError::Platform { .. } => "pull an image that is made for this machine".to_owned(),
        error if error.is_no_room() => {
            "the disk of the data directory is full up to its reserve: delete sandboxes, snapshots or images, empty the trash, \
             or make the filesystem larger"
                .to_owned()
        }
        _ => return None,
    })
}

/// What to do when something inside said no.
fn refused_hint(kind: Failure) -> Option<&'static str> {
    Some(match kind {
        Failure::NotExecutable => {
            "make it executable with `chmod +x`, or run it with its interpreter: `sh FILE`, `python3 FILE`"
        }
        Failure::NoDirectory => {
            "make the directory first (`keep exec NAME -- mkdir -p DIR`), or name another with -C"
        }
        Failure::NoUser => {
            "name a user of the sandbox (`keep exec NAME -- cat /etc/passwd`), or a number"
        }
        Failure::NotFound => "`keep exec NAME -- ls DIR` shows what is there",
        Failure::Denied => "name a user that may, with `-u root`",
        Failure::NoSpace => {
            "remove files inside, or give it more with `keep update NAME --disk SIZE`"
        }
        Failure::Refused => "start what listens there, on 0.0.0.0 or localhost inside the sandbox",
        Failure::NoExecutable
        | Failure::Exists
        | Failure::Invalid
        | Failure::Exhausted
        | Failure::Fault => return None,
    })
}

fn guarded_hint(name: &Name, findings: &[Finding]) -> String {
    if findings.iter().any(|found| found.kind == FindingKind::Secret) {
        format!(
            "`keep stop {name} --redact` masks them, `--drop GLOB` leaves files out (archives cannot be masked), \
             `--discard` gives up what the session wrote"
        )
    } else {
        format!("`keep stop {name} --promote GLOB` keeps them, `--drop GLOB` leaves them out")
    }
}
