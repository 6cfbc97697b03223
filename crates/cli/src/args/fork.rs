//! Arguments of the commands that compare forks and bring them back.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use sandkeep_client::types::Span;

pub(super) const DIFF_HELP: &str = "\
A point is
  my-app           the sandbox as it is now; it is not started for this
  my-app@saved     its last snapshot
  my-app@base      what it started from: the snapshot of its origin, or its image
  my-app@LABEL     its newest snapshot with that label
  snp-...          a snapshot
  image:debian     an image
With one point, FROM is its @base. Paths and globs after `--` without a leading slash are below \
the working directory.

Examples:
  keep diff my-app try-a                      A added, D deleted, M modified, R renamed
  keep diff my-app@base my-app --patch -- src
  keep diff try-a --patch --relative /work/repo | git apply
  keep diff --group try                       all forks of `keep fork my-app try --count 3`";

/// Arguments of `diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// The points to compare: FROM TO, or one
    #[arg(value_name = "POINT", num_args = 0..=2, required_unless_present = "group")]
    pub(crate) points: Vec<String>,
    /// Only these paths or globs
    #[arg(last = true, value_name = "PATH")]
    pub(crate) paths: Vec<String>,
    /// Print a patch that `git apply` accepts
    #[arg(short = 'p', long, conflicts_with_all = ["stat", "name_only", "group"])]
    pub(crate) patch: bool,
    /// Print counts only
    #[arg(long, conflicts_with = "name_only")]
    pub(crate) stat: bool,
    /// Print paths only
    #[arg(long)]
    pub(crate) name_only: bool,
    /// In a patch, only what is below DIR, with paths relative to it
    #[arg(long, value_name = "DIR", requires = "patch")]
    pub(crate) relative: Option<String>,
    /// In a patch, the contents of binary files too
    #[arg(long, requires = "patch")]
    pub(crate) binary: bool,
    /// In a patch, paths in `.git` directories too; `git apply` refuses them
    #[arg(long, requires = "patch")]
    pub(crate) git_dir: bool,
    /// Compare the forks that were made together under this name, each with what it started from
    #[arg(long, value_name = "NAME", conflicts_with_all = ["points", "name_only"])]
    pub(crate) group: Option<String>,
    /// Maximum number of paths; all are counted
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: Option<u32>,
}

/// Arguments of `changes`.
#[derive(Debug, Args)]
pub(crate) struct ChangesArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Changes of one command, by its id from `keep history`
    #[arg(long, value_name = "ID")]
    pub(crate) command: Option<String>,
}

/// Arguments of `promote`.
#[derive(Debug, Args)]
pub(crate) struct PromoteArgs {
    /// The fork
    pub(crate) fork: String,
    /// Fail unless the origin, or the drive, is at this generation [default: the one the fork was forked at]
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
    /// Delete the fork afterwards; it stays in the trash for a while
    #[arg(long, conflicts_with = "only")]
    pub(crate) rm: bool,
    /// Only paths that match, as `keep merge --only` (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) only: Vec<String>,
    /// Unpack what --only names below DIR on this machine, with links, modes and times, and leave the origin alone
    #[arg(long, value_name = "DIR", requires = "only", conflicts_with = "expect_generation")]
    pub(crate) out: Option<PathBuf>,
    /// Put what --only names into a drive that no session writes to, and leave the origin alone
    #[arg(long, value_name = "drive:NAME[:/DIR]", requires = "only", conflicts_with = "out")]
    pub(crate) to: Option<DriveDir>,
    /// With --to, show what would be done, and do nothing
    #[arg(long, requires = "to")]
    pub(crate) dry_run: bool,
}

/// A directory in a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DriveDir {
    pub(crate) drive: String,
    /// Empty for its root.
    pub(crate) path: String,
}

impl FromStr for DriveDir {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix("drive:").filter(|rest| !rest.is_empty());
        let Some(rest) = rest else {
            return Err("write it as drive:NAME or drive:NAME:/DIR".to_owned());
        };
        let (drive, path) = rest.split_once(':').unwrap_or((rest, ""));
        Ok(Self { drive: drive.to_owned(), path: path.to_owned() })
    }
}

/// Arguments of `pick`.
#[derive(Debug, Args)]
pub(crate) struct PickArgs {
    /// The fork to promote
    pub(crate) fork: String,
    /// Fail unless the origin is at this generation [default: the one it was forked at]
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// Arguments of `merge`.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// The sandbox whose changes are taken
    pub(crate) source: String,
    /// The sandbox that gets them [default: the one SOURCE was forked from]
    #[arg(long, value_name = "NAME")]
    pub(crate) into: Option<String>,
    /// Show what would be done, and conflicts, and do nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// What to do with paths that changed on both sides
    #[arg(long, value_enum, default_value_t = ConflictsArg::Refuse)]
    pub(crate) conflicts: ConflictsArg,
    /// Take only paths that match (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) only: Vec<String>,
    /// Fail unless the target is at this generation
    #[arg(long, value_name = "GENERATION")]
    pub(crate) expect_generation: Option<u64>,
}

/// What to do with conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConflictsArg {
    /// Change nothing
    Refuse,
    /// Keep the target's version and write the other one beside it, as NAME.from-SOURCE
    Keep,
}

/// Arguments of `rename`.
#[derive(Debug, Args)]
pub(crate) struct RenameArgs {
    /// The sandbox
    pub(crate) name: String,
    /// Its new name
    pub(crate) to: String,
}

/// Arguments of `prune`.
#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// The sandbox whose forks are deleted
    pub(crate) name: String,
    /// Delete forks that do not run
    #[arg(long, required = true)]
    pub(crate) forks: bool,
    /// Only forks that were not used for this long, like 7d
    #[arg(long, value_name = "SPAN")]
    pub(crate) older: Option<Span>,
    /// Show which forks would be deleted, and delete none
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::DriveDir;

    #[test]
    fn a_directory_of_a_drive_is_read_as_it_is_written() {
        let read = |text: &str| text.parse().map(|DriveDir { drive, path }| (drive, path)).ok();
        let of = |drive: &str, path: &str| Some((drive.to_owned(), path.to_owned()));
        assert_eq!(read("drive:a"), of("a", ""));
        assert_eq!(read("drive:a:/b:c"), of("a", "/b:c"));
        for bad in ["", "a", "drive:", "/a"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
