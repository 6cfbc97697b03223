//! Their ids and ours: the same 26 characters behind another prefix.
//!
//! Theirs are opaque to their clients, but for two things: a snapshot's begins with `snap_` (the CLI
//! insists) and has 32 characters or more (the tree of snapshots does).

use sandkeep_core::model::{CommandId, DriveId, SessionId, SnapshotId};

/// An id that has two spellings.
pub(crate) trait Foreign: Sized + std::str::FromStr {
    /// How theirs begins.
    const THEIRS: &'static str;
    /// How ours begins.
    const OURS: &'static str;
    fn text(&self) -> &str;

    /// As their clients see it.
    fn out(&self) -> String {
        let tail = self.text().strip_prefix(Self::OURS).unwrap_or(self.text());
        format!("{}{tail}", Self::THEIRS)
    }

    /// Our id behind theirs, if it is one.
    fn read(theirs: &str) -> Option<Self> {
        let tail = theirs.strip_prefix(Self::THEIRS)?;
        format!("{}{tail}", Self::OURS).parse().ok()
    }
}

macro_rules! foreign {
    ($id:ty, $theirs:literal, $ours:literal) => {
        impl Foreign for $id {
            const THEIRS: &'static str = $theirs;
            const OURS: &'static str = $ours;
            fn text(&self) -> &str {
                self.as_str()
            }
        }
    };
}

foreign!(SessionId, "sbx_sk", "ses-");
foreign!(SnapshotId, "snap_sk", "snp-");
foreign!(DriveId, "drive_sk", "drv-");
foreign!(CommandId, "cmd_sk", "cmd-");

#[cfg(test)]
mod tests {
    use sandkeep_core::model::{SessionId, SnapshotId};

    use super::Foreign as _;

    #[test]
    fn ids_come_back_as_they_went() {
        let id = SessionId::fresh();
        assert_eq!(SessionId::read(&id.out()), Some(id.clone()));
        assert_eq!(SessionId::read(id.as_str()), None);
        assert_eq!(SessionId::read("sbx_sk../../etc"), None);
        let snapshot = SnapshotId::read("snap_sk01k00000000000000000000000").unwrap();
        assert!(snapshot.out().len() >= 32);
    }
}
