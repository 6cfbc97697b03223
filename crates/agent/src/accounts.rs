//! Reads a system's own `/etc/passwd` and `/etc/group`, without the C library's help: a static
//! program has none of its plug-ins.
//!
//! Shared, as source, by the agent and by our `sudo`.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

/// No account database is larger than this; what is over it is not read.
const LIMIT: u64 = 4 << 20;

/// The most groups the kernel takes.
const MOST_GROUPS: usize = 65_536;

/// One line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// The text of an account database; empty if it is missing or no plain file.
pub(crate) fn read(path: &str) -> String {
    // Not to block on a pipe somebody put there.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let Ok(fd) = rustix::fs::open(Path::new(path), flags, Mode::empty()) else {
        return String::new();
    };
    match rustix::fs::fstat(&fd) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {}
        _ => return String::new(),
    }
    let mut bytes = Vec::new();
    match File::from(fd).take(LIMIT).read_to_end(&mut bytes) {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => String::new(),
    }
}

/// All accounts, in the order of the file. Lines that are none are passed over.
pub(crate) fn accounts(passwd: &str) -> impl Iterator<Item = Account> {
    passwd.lines().filter_map(account)
}

fn account(line: &str) -> Option<Account> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
    let uid = parse_id(fields.nth(1)?)?;
    let gid = parse_id(fields.next()?)?;
    let or = |field: Option<&str>, otherwise: &str| {
        field.filter(|text| text.starts_with('/')).unwrap_or(otherwise).to_owned()
    };
    let home = or(fields.nth(1), "/");
    let shell = or(fields.next(), "/bin/sh");
    Some(Account { name, uid, gid, home, shell })
}

/// A number as a user or group id; `-1` in its unsigned form is no id.
pub(crate) fn parse_id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

/// The number of a group that has an entry.
pub(crate) fn group_id(group: &str, wanted: &str) -> Option<u32> {
    group.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == wanted).then(|| parse_id(fields.nth(1)?)).flatten()
    })
}

/// A user's own group and every group that lists the user.
pub(crate) fn groups_of(group: &str, name: &str, own: u32) -> Vec<u32> {
    let mut groups = vec![own];
    for line in group.lines() {
        let mut fields = line.split(':').skip(2);
        let (Some(gid), Some(members)) = (fields.next().and_then(parse_id), fields.next()) else {
            continue;
        };
        if members.split(',').any(|member| member == name) && !groups.contains(&gid) {
            groups.push(gid);
        }
    }
    groups.truncate(MOST_GROUPS);
    groups
}
