//! Who a command or a file operation is for, as the sandbox's own `/etc/passwd` and `/etc/group` say.
//!
//! A number without an entry is fine, with group 0, as container images expect. `user:group` gives
//! that one group and no supplementary ones.

use sandkeep_proto::link::Failure;

use crate::accounts::{self, Account, parse_id};
use crate::serve::error::RequestError;

/// A user, ready to be switched to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    /// The name, where there is an entry.
    pub(crate) name: Option<String>,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// Finds a user in the sandbox; root if `spec` is absent.
pub(crate) fn lookup(spec: Option<&str>) -> Result<Identity, RequestError> {
    let passwd = accounts::read("/etc/passwd");
    let group = accounts::read("/etc/group");
    find(spec.unwrap_or("0"), &passwd, &group)
}

fn find(spec: &str, passwd: &str, group: &str) -> Result<Identity, RequestError> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (spec, None),
    };
    let number: Option<u32> = parse_id(user);
    let entry = accounts::accounts(passwd)
        .find(|entry| entry.name == user)
        .or_else(|| accounts::accounts(passwd).find(|entry| number == Some(entry.uid)));
    let mut identity = match (entry, number) {
        (Some(entry), _) => entry.into(),
        (None, Some(uid)) => bare(uid),
        (None, None) if user == "root" => bare(0),
        (None, None) => {
            let message = format!("there is no user `{user}` in the sandbox");
            return Err(RequestError::new(Failure::NoUser, message));
        }
    };
    match wanted_group {
        Some(name) => {
            identity.gid = find_group(name, group)?;
            identity.groups = vec![identity.gid];
        }
        None => {
            identity.groups = match &identity.name {
                Some(name) => accounts::groups_of(group, name, identity.gid),
                None => vec![identity.gid],
            };
        }
    }
    Ok(identity)
}

fn bare(uid: u32) -> Identity {
    let (name, home) = match uid {
        0 => (Some("root".to_owned()), "/root"),
        _ => (None, "/"),
    };
    Identity {
        uid,
        gid: 0,
        groups: vec![],
        name,
        home: home.to_owned(),
        shell: "/bin/sh".to_owned(),
    }
}

impl From<Account> for Identity {
    fn from(account: Account) -> Self {
        let Account { name, uid, gid, home, shell } = account;
        Self { uid, gid, groups: vec![], name: Some(name), home, shell }
    }
}

fn find_group(wanted: &str, group: &str) -> Result<u32, RequestError> {
    accounts::group_id(group, wanted).or_else(|| parse_id(wanted)).ok_or_else(|| {
        RequestError::new(Failure::NoUser, format!("there is no group `{wanted}` in the sandbox"))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, proptest};
    use sandkeep_proto::link::Failure;

    use super::find;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        broken line\n\
        ada:x:1000:1001:Ada,,,:/home/ada:/bin/zsh\n\
        odd:x:7:7::relative:\n\
        7000:x:8:8::/seven:/bin/sh\n";
    const GROUP: &str =
        "root:x:0:\nada:x:1001:\nwheel:x:10:root,ada\nvideo:x:44:ada\nbad:x:no:ada\n";

    #[test]
    fn a_user_is_found_by_name_and_by_number() {
        for spec in ["ada", "1000"] {
            let ada = find(spec, PASSWD, GROUP).expect("she is there");
            assert_eq!((ada.uid, ada.gid), (1000, 1001));
            assert_eq!(ada.groups, [1001, 10, 44]);
            assert_eq!((ada.home.as_str(), ada.shell.as_str()), ("/home/ada", "/bin/zsh"));
        }
        assert_eq!(find("7000", PASSWD, GROUP).expect("a name of digits").uid, 8);
    }

    #[test]
    fn a_group_can_be_asked_for() {
        let ada = find("ada:wheel", PASSWD, GROUP).expect("she is there");
        assert_eq!((ada.gid, ada.groups), (10, vec![10]));
        let ada = find("1000:555", PASSWD, GROUP).expect("a bare number will do");
        assert_eq!((ada.gid, ada.groups), (555, vec![555]));
        assert_eq!(find("ada:", PASSWD, GROUP).expect("no group asked").gid, 1001);
    }

    #[test]
    fn a_number_needs_no_entry_and_a_name_does() {
        let some = find("4242", PASSWD, GROUP).expect("any number");
        assert_eq!((some.uid, some.gid, some.home.as_str()), (4242, 0, "/"));
        assert_eq!(some.groups, [0]);
        for spec in ["nobody-here", "", "ada:nogroup", "4294967295", "-1"] {
            let problem = find(spec, PASSWD, GROUP).expect_err("no such user or group");
            assert_eq!(problem.kind, Failure::NoUser, "{spec}");
        }
        assert_eq!(find("root", "", "").expect("root always is").home, "/root");
    }

    #[test]
    fn what_an_entry_leaves_out_is_filled_in() {
        let odd = find("odd", PASSWD, GROUP).expect("it is there");
        assert_eq!((odd.home.as_str(), odd.shell.as_str()), ("/", "/bin/sh"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_text_is_survived(spec in "[a-z0-9:]{0,8}", passwd in "[a-z0-9:\n]{0,60}", group in "[a-z0-9:,\n]{0,60}") {
            let _ = find(&spec, &passwd, &group);
        }
    }
}
