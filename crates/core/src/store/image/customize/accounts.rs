//! The default user, added to a base's accounts.

use std::collections::BTreeSet;

/// What the default user is called, and its group.
pub(super) const USER: &str = "ubuntu";
/// Where it lives.
pub(super) const HOME: &str = "/vercel";
/// The number people expect it to have, and the first of a normal user.
const NUMBER: u32 = 1000;
/// The last number that is a person's.
const LAST: u32 = 60_000;

/// The account databases of a system. Those that keep passwords are not everywhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tables {
    pub(super) passwd: String,
    pub(super) group: String,
    pub(super) shadow: Option<String>,
    pub(super) gshadow: Option<String>,
}

/// Who the default user became.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Tables {
    /// Makes sure of the default user. An existing one keeps its numbers; no user is renamed.
    pub(super) fn admit(&mut self, shell: &str) -> Numbers {
        if self.passwd.is_empty() {
            self.passwd = "root:x:0:0:root:/root:/bin/sh\n".to_owned();
        }
        if self.group.is_empty() {
            self.group = "root:x:0:\n".to_owned();
        }
        let numbers = match find(&self.passwd, USER) {
            Some(line) => {
                let number = |at| line.split(':').nth(at).and_then(|text| text.parse().ok());
                let (uid, gid) = (number(2).unwrap_or(NUMBER), number(3).unwrap_or(NUMBER));
                let moved = moved(line, shell);
                self.passwd = replaced(&self.passwd, USER, &moved);
                Numbers { uid, gid }
            }
            None => {
                let numbers = self.choose();
                let Numbers { uid, gid } = numbers;
                append(&mut self.passwd, &format!("{USER}:x:{uid}:{gid}:Ubuntu:{HOME}:{shell}"));
                numbers
            }
        };
        if !ids(&self.group).contains(&numbers.gid) {
            append(&mut self.group, &format!("{USER}:x:{}:", numbers.gid));
        }
        // Locked: there is no password to log in with. Without a line, the account would be invalid.
        for (table, line) in
            [(&mut self.shadow, ":*:19000:0:99999:7:::"), (&mut self.gshadow, ":*::")]
        {
            if let Some(table) = table.as_mut().filter(|table| find(table, USER).is_none()) {
                append(table, &format!("{USER}{line}"));
            }
        }
        numbers
    }

    /// The numbers of a user who is new: 1000 for both, or the next that is free for both.
    fn choose(&self) -> Numbers {
        let (users, groups) = (ids(&self.passwd), ids(&self.group));
        if let Some(gid) =
            find(&self.group, USER).and_then(|line| line.split(':').nth(2)?.parse().ok())
        {
            let uid = (NUMBER..=LAST).find(|number| !users.contains(number)).unwrap_or(LAST);
            return Numbers { uid, gid };
        }
        let free = |number: &u32| !users.contains(number) && !groups.contains(number);
        let number = (NUMBER..=LAST).find(free).unwrap_or(LAST);
        Numbers { uid: number, gid: number }
    }
}

/// A user's line, with our home and shell.
fn moved(line: &str, shell: &str) -> String {
    let mut fields: Vec<&str> = line.split(':').collect();
    fields.resize(7, "");
    fields[5] = HOME;
    fields[6] = shell;
    fields.join(":")
}

fn find<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    table.lines().find(|line| line.split(':').next() == Some(name))
}

fn replaced(table: &str, name: &str, with: &str) -> String {
    let mut text = String::with_capacity(table.len() + with.len());
    for line in table.lines() {
        let ours = line.split(':').next() == Some(name);
        text.push_str(if ours { with } else { line });
        text.push('\n');
    }
    text
}

fn append(table: &mut String, line: &str) {
    if !table.is_empty() && !table.ends_with('\n') {
        table.push('\n');
    }
    table.push_str(line);
    table.push('\n');
}

/// The numbers a table has given away.
fn ids(table: &str) -> BTreeSet<u32> {
    table.lines().filter_map(|line| line.split(':').nth(2)?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::{Numbers, Tables};

    fn tables(passwd: &str, group: &str) -> Tables {
        Tables {
            passwd: passwd.to_owned(),
            group: group.to_owned(),
            shadow: Some("root:*:1::::::\n".to_owned()),
            gshadow: None,
        }
    }

    #[test]
    fn a_system_without_people_gets_the_user_as_1000() {
        let mut plain = tables("root:x:0:0:root:/root:/bin/bash", "root:x:0:\n");
        assert_eq!(plain.admit("/bin/bash"), Numbers { uid: 1000, gid: 1000 });
        assert_eq!(
            plain.passwd,
            "root:x:0:0:root:/root:/bin/bash\nubuntu:x:1000:1000:Ubuntu:/vercel:/bin/bash\n"
        );
        assert_eq!(plain.group, "root:x:0:\nubuntu:x:1000:\n");
        assert_eq!(plain.shadow.as_deref(), Some("root:*:1::::::\nubuntu:*:19000:0:99999:7:::\n"));
        assert_eq!(plain.gshadow, None, "what the base does not have is not made up");
        let again = plain.clone();
        plain.admit("/bin/bash");
        assert_eq!(plain, again, "a second time changes nothing");
    }

    #[test]
    fn the_user_of_an_ubuntu_keeps_its_numbers_and_groups() {
        let mut ubuntu = tables(
            "root:x:0:0::/root:/bin/bash\nubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/sh\n",
            "root:x:0:\nadm:x:4:ubuntu\nubuntu:x:1000:\n",
        );
        let group = ubuntu.group.clone();
        assert_eq!(ubuntu.admit("/bin/bash"), Numbers { uid: 1000, gid: 1000 });
        assert!(ubuntu.passwd.ends_with("ubuntu:x:1000:1000:Ubuntu:/vercel:/bin/bash\n"));
        assert_eq!(ubuntu.group, group);
        let mut odd = tables("ubuntu:x:500:7:::\n", "seven:x:7:\n");
        assert_eq!(odd.admit("/bin/sh"), Numbers { uid: 500, gid: 7 });
        assert_eq!(odd.group, "seven:x:7:\n");
    }

    #[test]
    fn somebody_elses_1000_stays_somebody_elses() {
        let mut node = tables(
            "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/bash\n",
            "root:x:0:\nnode:x:1000:\nextra:x:1001:\n",
        );
        assert_eq!(node.admit("/bin/bash"), Numbers { uid: 1002, gid: 1002 });
        assert!(node.passwd.contains("node:x:1000:1000::/home/node:/bin/bash\n"));
        let mut group_only = tables("root:x:0:0::/root:/bin/sh\n", "ubuntu:x:77:\n");
        assert_eq!(group_only.admit("/bin/sh"), Numbers { uid: 1000, gid: 77 });
        assert_eq!(group_only.group, "ubuntu:x:77:\n");
    }

    #[test]
    fn an_image_without_accounts_gets_root_too() {
        let mut empty = Tables::default();
        empty.admit("/bin/sh");
        assert!(empty.passwd.starts_with("root:x:0:0:"));
        assert!(empty.group.starts_with("root:x:0:\n"));
        let mut broken = tables("garbage\n::::\nubuntu\n", "x:x:notanumber:\n");
        assert_eq!(broken.admit("/bin/sh"), Numbers { uid: 1000, gid: 1000 });
    }
}
