//! What `keep serve` prints when it is ready: where it listens, the next command to type, and what
//! this host lacks for more.

use std::path::Path;

use sandkeep_core::driver::Check;
use sandkeep_core::store::{Enforcement, enforcement};

use crate::config::Resolved;
use crate::locate::{self, ClientFile};
use crate::machines;

/// Three lines, and a fourth if something is missing.
pub(crate) fn greeting(config: &Resolved, file: &ClientFile) -> String {
    let mut places: Vec<String> = file.url.iter().cloned().collect();
    places.extend(file.unix_socket.iter().map(|path| format!("unix://{}", path.display())));
    let needs = match config.microvm.enabled {
        true => machines::needs(&config.data, &config.microvm),
        // Somebody decided to do without.
        false => Vec::new(),
    };
    let mut text = lines(&places, &config.data, config.data == locate::default_data());
    let missing = missing(&needs, enforcement(&config.data).ok());
    if !missing.is_empty() {
        text.push_str(&format!("For more:  {}; `keep doctor` explains\n", missing.join("; ")));
    }
    text
}

fn lines(places: &[String], data: &Path, usual: bool) -> String {
    let data = data.display();
    // Clients that look at the usual address of a server need no setting.
    let told = if usual { String::new() } else { format!("export SANDKEEP_DATA={data}; ") };
    format!(
        "Sandkeep {} listens on {}; data in {data}
Try it:    {told}keep run --rm -- uname -a
Then:      keep create my-app; keep exec my-app -- ls /; keep stop my-app; keep --help
",
        env!("CARGO_PKG_VERSION"),
        places.join(" and "),
    )
}

/// What this host could do if more were there, each with how to get it.
fn missing(needs: &[Check], disk_limits: Option<Enforcement>) -> Vec<String> {
    let lacking: Vec<&Check> = needs.iter().filter(|check| !check.ok).collect();
    let fixes: Vec<&str> = lacking.iter().filter_map(|check| check.fix.as_deref()).collect();
    let mut missing = Vec::new();
    // What cannot be fixed, such as another processor, is not worth a line at every start.
    if !lacking.is_empty() && fixes.len() == lacking.len() {
        missing.push(format!("microVMs, which keep memory, need {}", in_one(&fixes).join(", ")));
    }
    if let Some(Enforcement::Counted { fix: Some(_), .. }) = disk_limits {
        missing.push("exact disk limits need project quotas".to_owned());
    }
    missing
}

/// The same fixes, with all packages installed by one command.
fn in_one(fixes: &[&str]) -> Vec<String> {
    let package = |fix: &str| {
        let rest = fix.strip_prefix('`')?.strip_prefix(machines::INSTALL)?.strip_suffix('`')?;
        Some(rest.trim().to_owned())
    };
    let packages: Vec<String> = fixes.iter().filter_map(|fix| package(fix)).collect();
    let mut commands = Vec::new();
    if !packages.is_empty() {
        commands.push(format!("`{} {}`", machines::INSTALL, packages.join(" ")));
    }
    let others = fixes.iter().filter(|fix| package(fix).is_none());
    commands.extend(others.map(|fix| (*fix).to_owned()));
    commands
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sandkeep_core::driver::Check;
    use sandkeep_core::store::Enforcement;

    use super::{lines, missing};
    use crate::config::MicrovmSettings;
    use crate::machines::{INSTALL, needs};

    fn check(ok: bool, fix: Option<&str>) -> Check {
        Check { name: "x", ok, detail: String::new(), fix: fix.map(str::to_owned) }
    }

    #[test]
    fn three_lines_say_where_and_what_next() {
        let places = ["http://127.0.0.1:1".to_owned(), "unix:///d/keep.sock".to_owned()];
        let usual = lines(&places, Path::new("/d"), true);
        assert_eq!(usual.lines().count(), 3);
        assert!(usual.contains("http://127.0.0.1:1 and unix:///d/keep.sock"), "{usual}");
        assert!(!usual.contains("SANDKEEP_DATA"), "{usual}");
        let other = lines(&places, Path::new("/d"), false);
        assert_eq!(other.lines().count(), 3);
        assert!(other.contains("export SANDKEEP_DATA=/d; keep run"), "{other}");
    }

    #[test]
    fn only_what_is_missing_and_can_be_had_is_told() {
        let quotas = || Some(Enforcement::Projects);
        assert!(missing(&[check(true, None)], quotas()).is_empty());
        let settings = MicrovmSettings { qemu: "/no/such".into(), ..MicrovmSettings::default() };
        let empty = tempfile::tempdir().unwrap();
        let mut lacking = needs(empty.path(), &settings);
        lacking.push(Check { fix: Some(format!("`{INSTALL} erofs-utils`")), ..check(false, None) });
        let told = missing(&lacking, quotas()).concat();
        assert!(told.contains(" qemu-system-x86 ") && told.contains(" erofs-utils`"), "{told}");
        assert!(told.contains(", `keep microvm setup"), "{told}");
        assert_eq!(told.matches("apt-get").count(), 1, "{told}");
        assert!(missing(&[check(false, None)], quotas()).is_empty(), "another processor");
        let counted = |fix: Option<&str>| {
            Some(Enforcement::Counted { reason: String::new(), fix: fix.map(str::to_owned) })
        };
        assert!(missing(&[], counted(Some("mount it so")))[0].contains("project quotas"));
        assert!(missing(&[], counted(None)).is_empty(), "no quotas on this filesystem");
    }
}
