//! What of this machine goes into the `host` image.
//!
//! Everything is left out unless a rule here takes it:
//!
//! 1. `/usr`, and `/bin`, `/sbin`, `/lib*` where they are directories of their own, are taken whole,
//!    but for [`LEFT_OUT`].
//! 2. Of `/etc`, only the names in [`ETC`] are taken. Daemons' settings, credentials, keys, and all
//!    that identifies this machine are not on the list. Some files are written anew: see
//!    [`super::etc_files`].
//! 3. Of `/var`, what package managers need to know is taken ([`VAR`]).
//! 4. [`SKELETON`] is made as empty directories.
//! 5. Directories named in the settings are taken whole.
//!
//! And wherever it lies, this never is taken:
//!
//! - a file that others may not read, unless it is a program: who has no business with it on the host
//!   has none in a sandbox; a directory that others may not enter is made, but empty;
//! - a file or directory named like those in which people keep credentials ([`SECRET_NAMES`]);
//! - a person's home directory;
//! - sockets, pipes and devices;
//! - other filesystems mounted below.

/// Whether files are shared with the host or are the image's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Means {
    /// Hard links, where the filesystem is the same: for what is replaced, never written in place.
    Link,
    /// Copies: for what the host may write in place.
    Copy,
}

/// Where programs and libraries are.
pub(super) const PROGRAMS: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Below [`PROGRAMS`]: of no use without the host's kernel, or settings of the host.
pub(super) const LEFT_OUT: [&str; 7] = [
    "usr/lib/modules",
    "usr/lib/firmware",
    "usr/local/etc",
    "usr/local/games",
    "usr/lib/debug/lib/modules",
    "lib/modules",
    "lib/firmware",
];

/// Below [`PROGRAMS`]: databases, which are written in place.
pub(super) const COPIED: [&str; 1] = ["usr/lib/sysimage"];

/// What is taken of `/etc`. A `*` at the end stands for any ending; a `/` leads into a directory of
/// which nothing else is taken.
pub(super) const ETC: &[&str] = &[
    // Shells and terminals.
    "bash.bashrc",
    "bash_completion",
    "bash_completion.d",
    "bash",
    "bashrc",
    "csh.*",
    "zsh",
    "zshrc",
    "zshenv",
    "zprofile",
    "profile",
    "profile.d",
    "skel",
    "shells",
    "inputrc",
    "terminfo",
    "DIR_COLORS*",
    "screenrc",
    "tmux.conf",
    // The linker, names of protocols and places, the clock.
    "ld.so.*",
    "ld-musl-*",
    "alternatives",
    "nsswitch.conf",
    "host.conf",
    "gai.conf",
    "protocols",
    "services",
    "rpc",
    "ethertypes",
    "networks",
    "netconfig",
    "bindresvport.blacklist",
    "localtime",
    "timezone",
    "locale.alias",
    "locale.gen",
    "locale.conf",
    "default/locale",
    "default/useradd",
    "default/nss",
    // Which system this is, and its package manager.
    "os-release",
    "lsb-release",
    "system-release*",
    "*-release",
    "debian_version",
    "issue",
    "issue.net",
    "dpkg",
    "debconf.conf",
    "ucf.conf",
    "apt/apt.conf.d",
    "apt/preferences.d",
    "apt/keyrings",
    "apt/trusted.gpg.d",
    "apt/sources.list",
    "apt/sources.list.d",
    "dnf",
    "yum",
    "yum.repos.d",
    "rpm",
    "pacman.conf",
    "makepkg.conf",
    "pacman.d/mirrorlist",
    "apk",
    "init.d",
    "rc?.d",
    // Whom to trust.
    "ca-certificates",
    "ca-certificates.conf",
    "ssl/certs",
    "ssl/openssl.cnf",
    "ssl/cert.pem",
    "pki/ca-trust",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "pki/tls/openssl.cnf",
    "pki/rpm-gpg",
    "crypto-policies",
    // Who may do what.
    "pam.conf",
    "pam.d",
    "security",
    "login.defs",
    "adduser.conf",
    "deluser.conf",
    "libaudit.conf",
    // Fonts, desktops' settings, documents.
    "fonts",
    "X11",
    "xdg",
    "gtk-2.0",
    "gtk-3.0",
    "dconf",
    "glvnd",
    "OpenCL",
    "vulkan",
    "ImageMagick*",
    "ghostscript",
    "libreoffice",
    "texmf",
    "papersize",
    "paperspecs",
    "sgml",
    "xml",
    "groff",
    "manpath.config",
    "man_db.conf",
    "magic",
    "magic.mime",
    "mime.types",
    "mailcap",
    "mailcap.order",
    // Languages and tools.
    "java*",
    ".java",
    "jvm*",
    "maven",
    "ant",
    "python*",
    "perl",
    "ruby*",
    "php",
    "R",
    "emacs",
    "vim",
    "vimrc",
    "nanorc",
    "gdb",
    "gprofng.rc",
    "wgetrc",
    "xattr.conf",
    "mke2fs.conf",
    "e2scrub.conf",
    "iproute2",
    "libnl-3",
    "postgresql-common",
];

/// What is taken of `/var`.
pub(super) const VAR: [&str; 13] = [
    "var/lib/dpkg",
    "var/lib/apt/extended_states",
    "var/lib/rpm",
    "var/lib/pacman/local",
    "var/lib/ucf",
    "var/lib/pam",
    "var/lib/python",
    "var/lib/sgml-base",
    "var/lib/xml-core",
    "var/lib/ca-certificates-java",
    "var/lib/dictionaries-common",
    "var/lib/emacsen-common",
    "var/lib/systemd/deb-systemd-helper-enabled",
];

/// Directories every system has, with the modes they get where the host has none of that name. Their
/// content stays on the host.
pub(super) const SKELETON: [(&str, u32); 39] = [
    ("boot", 0o755),
    ("dev", 0o755),
    ("etc", 0o755),
    ("etc/apt", 0o755),
    ("etc/systemd", 0o755),
    ("etc/systemd/system", 0o755),
    ("home", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("usr/local", 0o755),
    ("usr/local/etc", 0o755),
    ("var", 0o755),
    ("var/backups", 0o755),
    ("var/cache", 0o755),
    ("var/cache/apt", 0o755),
    ("var/cache/apt/archives", 0o755),
    ("var/cache/apt/archives/partial", 0o700),
    ("var/cache/debconf", 0o755),
    ("var/lib", 0o755),
    ("var/lib/apt", 0o755),
    ("var/lib/apt/lists", 0o755),
    ("var/lib/apt/lists/partial", 0o700),
    ("var/lib/misc", 0o755),
    ("var/lib/systemd", 0o755),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/log/apt", 0o755),
    ("var/mail", 0o2775),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

/// How people name what holds credentials.
pub(super) const SECRET_NAMES: [&str; 16] = [
    ".ssh",
    ".aws",
    ".azure",
    ".gnupg",
    ".kube",
    ".docker",
    ".netrc",
    ".git-credentials",
    ".pgpass",
    ".vault-token",
    ".env",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "opasswd",
];

/// Whether the file or directory itself may be taken; `mode` with its type bits.
pub(super) fn others_may_read(mode: u32) -> bool {
    mode & 0o004 != 0 || mode & 0o111 != 0
}

/// Whether the content of a directory may be taken.
pub(super) fn others_may_enter(mode: u32) -> bool {
    mode & 0o005 == 0o005
}

/// Whether a name in `/etc`, or below one of its directories, is on the list; and if it is only a
/// directory on the way to something that is, says so.
pub(super) fn etc_rule(path: &str) -> EtcRule {
    let mut answer = EtcRule::LeaveOut;
    for rule in ETC {
        if matches(rule, path) {
            return EtcRule::Take;
        }
        if rule.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')) {
            answer = EtcRule::Enter;
        }
    }
    answer
}

/// What becomes of a name in `/etc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EtcRule {
    /// It is taken, with all that is below.
    Take,
    /// Only some of what is below is taken.
    Enter,
    /// It stays on the host.
    LeaveOut,
}

fn matches(rule: &str, path: &str) -> bool {
    match (rule.strip_prefix('*'), rule.strip_suffix('*'), rule.split_once('?')) {
        (Some(end), _, _) => path.ends_with(end) && !path.contains('/'),
        (_, Some(start), _) => path.starts_with(start) && !path.contains('/'),
        (_, _, Some((start, end))) => {
            path.len() == rule.len() && path.starts_with(start) && path.ends_with(end)
        }
        _ => rule == path,
    }
}

#[cfg(test)]
mod tests {
    use super::{EtcRule, etc_rule};

    #[test]
    fn only_what_is_listed_is_taken_from_etc() {
        for (path, rule) in [
            ("bash.bashrc", EtcRule::Take),
            ("ld.so.conf.d", EtcRule::Take),
            ("rc5.d", EtcRule::Take),
            ("debian_version", EtcRule::Take),
            ("fedora-release", EtcRule::Take),
            ("ssl", EtcRule::Enter),
            ("ssl/certs", EtcRule::Take),
            ("ssl/private", EtcRule::LeaveOut),
            ("apt", EtcRule::Enter),
            ("apt/auth.conf", EtcRule::LeaveOut),
            ("ssh", EtcRule::LeaveOut),
            ("hostname", EtcRule::LeaveOut),
            ("krb5.keytab", EtcRule::LeaveOut),
            ("wireguard", EtcRule::LeaveOut),
            ("npmrc", EtcRule::LeaveOut),
            ("shadow", EtcRule::LeaveOut),
        ] {
            assert_eq!(etc_rule(path), rule, "{path}");
        }
    }
}
