//! The files of `/etc` that are written anew, because the host's own reveal too much or lead
//! nowhere.
//!
//! `hostname` and `hosts` are not among them: a machine gives a sandbox without them its own, with the
//! name the sandbox has. `sudo` complains where it cannot resolve that.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::super::error::{ImageError, ImageResult};

/// Accounts from here on belong to people.
const FIRST_PERSON: u32 = 1000;
const NOBODY: u32 = 65534;

/// Writes them below `diff`, reading the accounts of `root`.
pub(super) fn write(root: &Path, diff: &Path) -> ImageResult<()> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let passwd = system_accounts(&read("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n");
    let group = system_accounts(&read("etc/group"), "root:x:0:\n");
    let shadow_group = id_of(&group, "shadow").unwrap_or(0);
    let users = names(&passwd);
    let shadow: String =
        users.iter().map(|user| format!("{user}:*:19000:0:99999:7:::\n")).collect();
    let group = without_strangers(&group, &users);
    let gshadow: String = names(&group).iter().map(|group| format!("{group}:*::\n")).collect();

    put(diff, "etc/passwd", &passwd, 0o644, 0)?;
    put(diff, "etc/group", &group, 0o644, 0)?;
    put(diff, "etc/shadow", &shadow, 0o640, shadow_group)?;
    put(diff, "etc/gshadow", &gshadow, 0o640, shadow_group)?;
    for empty in [
        "etc/subuid",
        "etc/subgid",
        "etc/machine-id",
        "etc/resolv.conf",
        "etc/environment",
        "etc/fstab",
    ] {
        put(diff, empty, "", 0o644, 0)?;
    }
    if ["usr/bin/sudo", "bin/sudo"].iter().any(|sudo| diff.join(sudo).exists()) {
        let sudoers = "Defaults\tenv_reset\n\
             Defaults\tsecure_path=\"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\"\n\
             root\tALL=(ALL:ALL) ALL\n\
             %sudo\tALL=(ALL:ALL) ALL\n\
             @includedir /etc/sudoers.d\n";
        put(diff, "etc/sudoers", sudoers, 0o440, 0)?;
        let drop_ins = diff.join("etc/sudoers.d");
        fs::create_dir_all(&drop_ins).map_err(ImageError::io("create", &drop_ins))?;
    }
    strip_passwords(&diff.join("etc"))?;
    link(diff, "etc/mtab", "/proc/mounts")?;
    link(diff, "var/run", "/run")?;
    link(diff, "var/lock", "/run/lock")?;
    fill_home(diff)
}

/// The home of root is as a new user's would be.
fn fill_home(diff: &Path) -> ImageResult<()> {
    let skel = diff.join("etc/skel");
    let Ok(entries) = fs::read_dir(&skel) else { return Ok(()) };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let to = diff.join("root").join(entry.file_name());
            fs::copy(entry.path(), &to).map_err(ImageError::io("copy to", &to))?;
        }
    }
    Ok(())
}

/// Takes the passwords out of URLs in the settings that were copied: package sources and proxies have
/// them at times, for all to read.
fn strip_passwords(dir: &Path) -> ImageResult<()> {
    const LARGEST: u64 = 1 << 20;
    for entry in fs::read_dir(dir).map_err(ImageError::io("read", dir))? {
        let entry = entry.map_err(ImageError::io("read", dir))?;
        let path = entry.path();
        let found = entry.metadata().map_err(ImageError::io("look at", &path))?;
        if found.is_dir() {
            strip_passwords(&path)?;
        } else if found.is_file() && found.len() <= LARGEST {
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let stripped = without_passwords(&text);
            if stripped != text {
                fs::write(&path, stripped).map_err(ImageError::io("write", &path))?;
            }
        }
    }
    Ok(())
}

fn without_passwords(text: &str) -> String {
    let mut stripped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        stripped.push_str(before);
        let end = after
            .find(|c: char| c == '/' || c.is_whitespace() || c == '"' || c == '\'')
            .unwrap_or(after.len());
        let host = match after[..end].rfind('@') {
            Some(sign) if after[..sign].contains(':') => sign + 1,
            _ => 0,
        };
        rest = &after[host..];
    }
    stripped.push_str(rest);
    stripped
}

fn put(diff: &Path, name: &str, text: &str, mode: u32, group: u32) -> ImageResult<()> {
    let path = diff.join(name);
    fs::write(&path, text).map_err(ImageError::io("write", &path))?;
    std::os::unix::fs::chown(&path, Some(0), Some(group))
        .map_err(ImageError::io("change the owner of", &path))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode))
        .map_err(ImageError::io("change the mode of", &path))
}

fn link(diff: &Path, name: &str, target: &str) -> ImageResult<()> {
    let path = diff.join(name);
    std::os::unix::fs::symlink(target, &path).map_err(ImageError::io("create", &path))
}

/// The lines whose id belongs to the system, with `root` in any case.
fn system_accounts(table: &str, root: &str) -> String {
    let mut kept = String::new();
    for line in table.lines() {
        let mut fields = line.split(':');
        let (Some(name), Some(_), Some(id)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let Ok(id) = id.parse::<u32>() else { continue };
        if id < FIRST_PERSON || id == NOBODY {
            let rest: String = fields.map(|field| format!(":{field}")).collect();
            kept.push_str(&format!("{name}:x:{id}{rest}\n"));
        }
    }
    if !kept.lines().any(|line| line.starts_with("root:")) {
        kept.insert_str(0, root);
    }
    kept
}

/// Groups without the members that have no account.
fn without_strangers(group: &str, users: &BTreeSet<String>) -> String {
    let mut kept = String::new();
    for line in group.lines() {
        let (head, members) = line.rsplit_once(':').unwrap_or((line, ""));
        let members: Vec<&str> =
            members.split(',').filter(|member| users.contains(*member)).collect();
        kept.push_str(&format!("{head}:{}\n", members.join(",")));
    }
    kept
}

fn names(table: &str) -> BTreeSet<String> {
    table.lines().filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
}

fn id_of(table: &str, name: &str) -> Option<u32> {
    let line = table.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split(':').nth(2)?.parse().ok()
}

/// Home directories of people and of root, as far as they are named.
pub(super) fn homes(root: &Path) -> BTreeSet<String> {
    let passwd = fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
    let mut homes = BTreeSet::new();
    for line in passwd.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, id, _, _, home, ..] = fields[..] else { continue };
        let Ok(id) = id.parse::<u32>() else { continue };
        if id == 0 || (id >= FIRST_PERSON && id != NOBODY) {
            homes.insert(home.trim_matches('/').to_owned());
        }
    }
    homes
}

#[cfg(test)]
mod tests {
    use super::without_passwords;

    #[test]
    fn urls_lose_their_passwords_and_nothing_else() {
        for (given, kept) in [
            ("deb https://me:secret@repo.example/debian x", "deb https://repo.example/debian x"),
            ("a://u:p@h b://u:p@h/x@y", "a://h b://h/x@y"),
            ("see ftp://anonymous@host/ and a@b", "see ftp://anonymous@host/ and a@b"),
            ("http://[::1]:80/@", "http://[::1]:80/@"),
        ] {
            assert_eq!(without_passwords(given), kept);
        }
    }
}
