//! Who may run commands, and as which user.
//!
//! The policy is a file with one user name a line. It is trusted only if it is root's own: a plain
//! file, in a directory and with an owner and a mode with which no other user can have written it.
//! A missing file names no user.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd;

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::accounts::{self, Account, parse_id};
use crate::options::Run;

/// Where the policy lies.
pub(super) const FILE: (&str, &str) = ("/etc", "keep-sudo.users");

/// A policy is a few names.
const LARGEST: u64 = 64 << 10;

/// Who started the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) shell: String,
}

/// Who the command is to run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) account: Account,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
}

impl Caller {
    /// Finds the name of a real user id.
    ///
    /// # Errors
    ///
    /// When there is no entry for it. Root needs none.
    pub(super) fn find(uid: u32, passwd: &str) -> Result<Self, String> {
        let entry = accounts::accounts(passwd).find(|account| account.uid == uid);
        let account = entry
            .or_else(|| (uid == 0).then(root))
            .ok_or_else(|| format!("user {uid} has no entry in /etc/passwd"))?;
        let Account { name, uid, gid, shell, .. } = account;
        Ok(Self { name, uid, gid, shell })
    }
}

/// Whether the caller may.
///
/// # Errors
///
/// Says that it may not.
pub(super) fn check(caller: &Caller, list: &str) -> Result<(), String> {
    let named = list.lines().any(|line| line.trim_end() == caller.name);
    if caller.uid == 0 || named {
        return Ok(());
    }
    Err(format!("{} may not run sudo in this sandbox", caller.name))
}

/// Reads a policy file, given by its directory and name.
///
/// # Errors
///
/// When someone other than root could have written it.
pub(super) fn read_list((directory, name): (&str, &str)) -> Result<String, String> {
    let wrong = |what: &str| format!("{directory}/{name} is not believed: {what}");
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = rustix::fs::open(directory, flags | OFlags::DIRECTORY, Mode::empty())
        .map_err(|error| wrong(&error.to_string()))?;
    if !roots_own(&stat(&parent)?) {
        return Err(wrong("others than root may write its directory"));
    }
    // Not to block on a pipe somebody put there.
    let opened = rustix::fs::openat(&parent, name, flags | OFlags::NONBLOCK, Mode::empty());
    let file = match opened {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(String::new()),
        Err(Errno::LOOP) => return Err(wrong("it is a link")),
        Err(error) => return Err(wrong(&error.to_string())),
    };
    let found = stat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(wrong("it is no plain file"));
    }
    if !roots_own(&found) {
        return Err(wrong("others than root may write it"));
    }
    let mut text = String::new();
    match File::from(file).take(LARGEST + 1).read_to_string(&mut text) {
        Ok(length) if length as u64 <= LARGEST => Ok(text),
        Ok(_) => Err(wrong("it is too long")),
        Err(error) => Err(wrong(&error.to_string())),
    }
}

fn stat(file: impl AsFd) -> Result<Stat, String> {
    rustix::fs::fstat(file).map_err(|error| error.to_string())
}

fn roots_own(stat: &Stat) -> bool {
    stat.st_uid == 0 && stat.st_mode & 0o022 == 0
}

impl Target {
    /// Finds who the command runs as: root by default. With a group alone it is the caller.
    ///
    /// # Errors
    ///
    /// When there is no such user or group. A number must have an entry too: one that has none
    /// today may be somebody's tomorrow.
    pub(super) fn find(
        run: &Run,
        caller: &Caller,
        passwd: &str,
        group: &str,
    ) -> Result<Self, String> {
        let by_uid = |uid| accounts::accounts(passwd).find(|account| account.uid == uid);
        let account = match (&run.user, &run.group) {
            (None, Some(_)) => by_uid(caller.uid),
            (None, None) => by_uid(0),
            (Some(user), _) => match user.strip_prefix('#') {
                Some(number) => parse_id(number).and_then(by_uid),
                None => accounts::accounts(passwd).find(|account| account.name == *user),
            },
        };
        let wants_root = match &run.user {
            Some(user) => user == "root" || user == "#0",
            None => run.group.is_none() || caller.uid == 0,
        };
        let account = account
            .or_else(|| wants_root.then(root))
            .ok_or_else(|| format!("unknown user {}", run.user.as_deref().unwrap_or_default()))?;
        let mut groups = accounts::groups_of(group, &account.name, account.gid);
        let mut gid = account.gid;
        if let Some(wanted) = &run.group {
            let found = match wanted.strip_prefix('#') {
                Some(number) => {
                    parse_id(number).filter(|id| group_ids(group).any(|gid| gid == *id))
                }
                None => accounts::group_id(group, wanted),
            };
            gid = found.ok_or_else(|| format!("unknown group {wanted}"))?;
            if !groups.contains(&gid) {
                groups.insert(0, gid);
            }
        }
        Ok(Self { account, gid, groups })
    }
}

fn group_ids(group: &str) -> impl Iterator<Item = u32> {
    group.lines().filter_map(|line| line.split(':').nth(2).and_then(parse_id))
}

/// Root needs no entry.
fn root() -> Account {
    Account {
        name: "root".to_owned(),
        uid: 0,
        gid: 0,
        home: "/root".to_owned(),
        shell: "/bin/sh".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use super::{Caller, Target, check, read_list};
    use crate::options::Run;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        ubuntu:x:1000:1000::/vercel:/bin/bash\n\
        alice:x:1001:1001::/home/alice:/bin/bash\n\
        twin:x:1000:1000::/:/bin/sh\n";
    const GROUP: &str =
        "root:x:0:\nadm:x:4:alice\nubuntu:x:1000:\nalice:x:1001:\ndevs:x:1002:alice\n";

    #[test]
    fn root_may_and_whoever_is_named_and_nobody_else() {
        let may = |uid, list: &str| check(&Caller::find(uid, PASSWD).unwrap(), list);
        assert_eq!(may(0, ""), Ok(()));
        assert_eq!(may(1000, "ubuntu\n"), Ok(()));
        assert_eq!(may(1000, "a\r\nubuntu\r\n"), Ok(()));
        for list in
            ["", "ubuntu\n", "alic\n", "alice2\n", "#alice\n", " alice\n", "ALL\n", "%alice\n"]
        {
            let refused = may(1001, list).unwrap_err();
            assert!(refused.contains("alice may not"), "{list}: {refused}");
        }
        assert!(Caller::find(4242, PASSWD).is_err());
        assert_eq!(Caller::find(0, "").unwrap().name, "root");
        assert_eq!(Caller::find(1000, PASSWD).unwrap().name, "ubuntu", "the first entry counts");
    }

    fn target(user: Option<&str>, group: Option<&str>) -> Result<Target, String> {
        let run = Run {
            user: user.map(str::to_owned),
            group: group.map(str::to_owned),
            ..Run::default()
        };
        Target::find(&run, &Caller::find(1000, PASSWD).unwrap(), PASSWD, GROUP)
    }

    #[test]
    fn a_target_comes_with_its_own_groups_and_none_of_the_callers() {
        let root = target(None, None).unwrap();
        assert_eq!((root.account.uid, root.gid, root.groups), (0, 0, vec![0]));
        for user in ["alice", "#1001"] {
            let alice = target(Some(user), None).unwrap();
            assert_eq!((alice.account.uid, alice.gid), (1001, 1001));
            assert_eq!(alice.groups, [1001, 4, 1002]);
        }
        let grouped = target(None, Some("devs")).unwrap();
        assert_eq!(
            (grouped.account.uid, grouped.gid, grouped.groups),
            (1000, 1002, vec![1002, 1000])
        );
        let both = target(Some("alice"), Some("#4")).unwrap();
        assert_eq!((both.gid, both.groups), (4, vec![1001, 4, 1002]));
    }

    #[test]
    fn a_target_must_exist() {
        for user in ["bob", "", "#4242", "#-1", "#4294967295", "#", "#x", "-1", "0"] {
            assert!(target(Some(user), None).is_err(), "{user}");
        }
        for group in ["nope", "", "#4242", "#4294967295", "4"] {
            assert!(target(None, Some(group)).is_err(), "{group}");
        }
        let run = Run { user: Some("#0".to_owned()), ..Run::default() };
        let nobody_listed = Target::find(&run, &Caller::find(0, "").unwrap(), "", "").unwrap();
        assert_eq!(nobody_listed.account.uid, 0);
    }

    #[test]
    fn a_policy_that_others_could_have_written_is_not_believed() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED a_policy_that_others_could_have_written_is_not_believed: needs root");
            return;
        }
        let dir = std::env::temp_dir().join(format!("keep-sudo-policy-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        let at = dir.to_str().unwrap();
        let mode = |name: &str, mode| {
            fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        assert_eq!(read_list((at, "list")).unwrap(), "", "a missing one names nobody");
        fs::write(dir.join("list"), "ubuntu\n").unwrap();
        mode("list", 0o644);
        assert_eq!(read_list((at, "list")).unwrap(), "ubuntu\n");

        for open in [0o664, 0o646, 0o666] {
            mode("list", open);
            assert!(read_list((at, "list")).unwrap_err().contains("others than root"));
        }
        mode("list", 0o644);
        chown(dir.join("list"), Some(1000), None).unwrap();
        assert!(read_list((at, "list")).is_err(), "someone else's");
        chown(dir.join("list"), Some(0), None).unwrap();

        symlink("list", dir.join("link")).unwrap();
        assert!(read_list((at, "link")).unwrap_err().contains("link"));
        let through = format!("{at}-link");
        symlink(at, &through).unwrap();
        assert!(read_list((&through, "list")).is_err(), "a linked directory");
        fs::remove_file(&through).unwrap();
        fs::create_dir(dir.join("dir")).unwrap();
        assert!(read_list((at, "dir")).is_err());
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.join("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(read_list((at, "pipe")).is_err(), "and does not wait for a writer");
        fs::write(dir.join("long"), "x\n".repeat(40_000)).unwrap();
        assert!(read_list((at, "long")).unwrap_err().contains("too long"));
        fs::write(dir.join("bytes"), [0xff, 0xfe]).unwrap();
        assert!(read_list((at, "bytes")).is_err());

        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(read_list((at, "list")).is_err(), "a directory anyone may write");
        fs::remove_dir_all(&dir).unwrap();
    }
}
