//! The default machine of clients that come from elsewhere: the customized host, tried from inside.
//!
//! With the host's own `sudo` where it has one, and with ours, which other hosts get.

use crate::machine_support::{Machine, real_sudo};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::House;

#[tokio::test]
async fn our_own_sudo_makes_the_machine_people_expect() {
    let Some(house) = house("our_own_sudo_makes_the_machine_people_expect") else { return };
    let machine = Machine::without_sudo(&house).await;
    assert!(machine.ok("sudo -V").await.contains("keep-sudo"));
    expectations(&machine).await;
    our_sudo_is_not_fooled(&machine).await;
}

#[tokio::test]
async fn a_sudo_of_the_base_makes_it_too() {
    const NAME: &str = "a_sudo_of_the_base_makes_it_too";
    let Some(house) = house(NAME) else { return };
    let added = match real_sudo(house.path()) {
        Ok(added) => added,
        Err(why) => {
            skipped(NAME, &why);
            return;
        }
    };
    let machine = Machine::with_sudo(&house, added).await;
    assert!(machine.ok("sudo -V").await.contains("Sudo version"));
    expectations(&machine).await;
}

fn house(test: &str) -> Option<House> {
    House::new().map_err(|why| skipped(test, &why)).ok()
}

async fn expectations(machine: &Machine) {
    the_default_user(machine).await;
    sudo_keeps_the_environment(machine).await;
    users_and_groups(machine).await;
    what_file_systems_are_asked(machine).await;
    packages(machine).await;
}

async fn the_default_user(machine: &Machine) {
    assert_eq!(machine.ok("id -un; id -u; id -gn; id -g").await, "ubuntu\n1000\nubuntu\n1000\n");
    assert_eq!(machine.ok("echo $HOME $USER; pwd").await, "/vercel ubuntu\n/vercel/sandbox\n");
    let path = machine.ok("echo $PATH").await;
    assert!(path.starts_with("/vercel/bin:"), "{path}");
    for directory in ["/usr/local/bin", "/usr/sbin", "/sbin", "/usr/bin"] {
        assert!(path.trim().split(':').any(|one| one == directory), "{directory} in {path}");
    }
    let login = machine.ok("bash -lc 'echo $PATH'").await;
    assert!(login.starts_with("/vercel/bin:"), "{login}");
    machine.ok("echo x > file && mkdir ../bin/d && touch ~/here && rm file").await;
    assert_eq!(
        machine.ok("stat -c '%U:%G %a' /vercel /vercel/sandbox /vercel/bin").await,
        "ubuntu:ubuntu 755\n".repeat(3)
    );
    let denied = machine.sh("touch /etc/x").await;
    assert!(denied.code == 1 && denied.err.contains("Permission denied"), "{denied:?}");
    assert_eq!(
        machine.ok("getent passwd ubuntu").await.trim().rsplit(':').next(),
        Some("/bin/bash")
    );
}

async fn sudo_keeps_the_environment(machine: &Machine) {
    let quiet = machine.sh("sudo -n true").await;
    assert_eq!((quiet.code, quiet.err.as_str()), (0, ""));
    assert_eq!(machine.sh("sudo sh -c 'exit 7'").await.code, 7);
    let env = machine.ok("MINE='a b' sudo env").await;
    for line in
        ["HOME=/root", "USER=root", "LOGNAME=root", "SUDO_USER=ubuntu", "SUDO_UID=1000", "MINE=a b"]
    {
        assert!(env.lines().any(|one| one == line), "{line} in {env}");
    }
    let path = machine.ok("echo $PATH").await;
    assert!(env.lines().any(|one| one == format!("PATH={}", path.trim())), "{env}");
    assert_eq!(
        machine.ok("sudo -E A=1 B='2 3' sh -c 'echo $A$B; pwd; id -u; id -G'").await,
        "12 3\n/vercel/sandbox\n0\n0\n"
    );
    assert_eq!(machine.ok("sudo -u nobody -- id -un").await, "nobody\n");
    assert_eq!(machine.ok("sudo -u '#0' -g ubuntu id -gn").await, "ubuntu\n");
    assert_eq!(machine.ok("sudo -i sh -c 'pwd; echo $HOME'").await, "/root\n/root\n");
    assert_eq!(machine.ok("sudo -s echo 'a;b' '$(id)'").await.lines().count(), 1);
    assert_eq!(machine.ok("echo in | sudo cat").await, "in\n");
    machine.ok("sudo -v && sudo -k && sudo -K && sudo -l >/dev/null").await;
    for wrong in ["sudo -u nobodyhere true", "sudo -u '#4242' true", "sudo nosuchprogram"] {
        let refused = machine.sh(wrong).await;
        assert_eq!(refused.code, 1, "{wrong}: {refused:?}");
        assert!(refused.err.contains("sudo:"), "{refused:?}");
    }
}

async fn users_and_groups(machine: &Machine) {
    machine.ok("sudo useradd -m -s /bin/bash alice").await;
    assert_eq!(machine.sh("sudo useradd -m -s /bin/bash alice").await.code, 9);
    machine.ok("sudo useradd -m -s /bin/bash bob").await;
    machine.ok("sudo chown alice:ubuntu /home/alice && sudo chmod 770 /home/alice").await;
    machine.ok("sudo chown bob:ubuntu /home/bob && sudo chmod 770 /home/bob").await;
    assert_eq!(machine.ok("sudo stat -c '%U:%G %a' /home/alice").await, "alice:ubuntu 770\n");
    let as_user = |user: &str, command: &str| {
        format!(
            r#"sudo -u {user} -- bash -c 'cd "$1" || exit 1; shift; exec "$@"' bash /home/{user} {command}"#
        )
    };
    assert_eq!(machine.ok(&as_user("alice", "pwd")).await, "/home/alice\n");
    assert_eq!(
        machine.ok(&as_user("alice", "env A=hello sh -c 'id -un; echo $HOME $A'")).await,
        "alice\n/home/alice hello\n"
    );
    let refused = machine.sh(&as_user("alice", "sudo -n whoami")).await;
    assert!(refused.code == 1 && refused.out.is_empty(), "{refused:?}");
    let refused = machine.sh(&as_user("alice", "su -c id")).await;
    assert!(refused.code != 0 && refused.out.is_empty(), "{refused:?}");

    // A home is the default user's too, by its group, and nobody else's.
    machine.ok("echo secret > /home/alice/s && sudo chown alice:alice /home/alice/s").await;
    for line in ["cat /home/alice/s", "ls /home/alice", "touch /home/alice/t"] {
        let denied = machine.sh(&as_user("bob", line)).await;
        assert!(denied.code != 0 && denied.err.contains("Permission denied"), "{line}: {denied:?}");
    }
    let missing = machine.sh(&as_user("alice", "base64 nope.txt")).await;
    assert!(missing.err.contains("No such file or directory"), "{missing:?}");

    machine.ok("sudo groupadd devs && sudo mkdir -p /shared/devs").await;
    assert_ne!(machine.sh("sudo groupadd devs").await.code, 0);
    machine.ok("sudo chown ubuntu:devs /shared/devs && sudo chmod 2770 /shared/devs").await;
    assert_eq!(machine.ok("sudo stat -c '%U:%G %a' /shared/devs").await, "ubuntu:devs 2770\n");
    machine.ok("sudo usermod -aG devs alice").await;
    machine.ok(&as_user("alice", "touch /shared/devs/f")).await;
    assert_eq!(machine.ok("sudo stat -c %G /shared/devs/f").await, "devs\n");
    assert!(machine.ok(&as_user("alice", "groups")).await.contains("devs"));
    machine.ok("sudo gpasswd -d alice devs").await;
    assert_ne!(machine.sh(&as_user("alice", "ls /shared/devs")).await.code, 0);

    machine
        .ok(&format!("{} & sleep 0.2", as_user("alice", "sleep 60 >/dev/null 2>&1 </dev/null")))
        .await;
    let pid = machine.ok("sudo pgrep -u alice -x sleep").await;
    assert_ne!(machine.sh(&as_user("bob", &format!("kill {pid}"))).await.code, 0);
    machine.ok(&format!("sudo kill {pid}")).await;
    machine.ok("sudo passwd -l bob && sudo usermod -s /bin/sh bob && sudo userdel -r bob").await;
    assert_eq!(machine.ok("sudo su alice -c 'id -un'").await, "alice\n");
}

async fn what_file_systems_are_asked(machine: &Machine) {
    machine.ok("mkdir -p fs/d && echo hello > fs/f && ln -s f fs/l").await;
    let listed = machine.ok(r"find fs -maxdepth 1 -mindepth 1 -printf '%f|%y\n' | sort").await;
    assert_eq!(listed, "d|d\nf|f\nl|l\n");
    let stat = machine.ok("stat -L -c '%s|%f|%u|%g|%X|%Y|%Z|%W|%h|%i|%d|%B|%b' fs/l").await;
    let fields: Vec<&str> = stat.trim().split('|').collect();
    assert_eq!((fields.len(), &fields[..4]), (13, &["6", "81a4", "1000", "1000"][..]));
    for (line, says) in [
        ("stat fs/no", "No such file or directory"),
        ("rmdir fs", "not empty"),
        ("ln -s f fs/l", "File exists"),
        ("ls -1 fs/no", "No such file or directory"),
    ] {
        let failed = machine.sh(line).await;
        assert!(failed.code != 0 && failed.err.contains(says), "{line}: {failed:?}");
    }
    assert_eq!(machine.ok("readlink fs/l; realpath fs/l").await, "f\n/vercel/sandbox/fs/f\n");
    machine.ok("truncate -s 3 fs/f && chmod 600 fs/f && cp fs/f fs/g && mv fs/g fs/h && mktemp -d /tmp/xXXXXXX").await;
    machine.ok("sudo chown root:root fs/h && sudo rm -rf fs").await;
}

/// Packages are installed as root, without a network.
async fn packages(machine: &Machine) {
    let script = r"
        mkdir -p p/DEBIAN p/usr/local/bin && printf '#!/bin/sh\necho hi\n' > p/usr/local/bin/hi &&
        chmod 755 p p/DEBIAN p/usr p/usr/local p/usr/local/bin p/usr/local/bin/hi &&
        printf 'Package: keep-hi\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n' > p/DEBIAN/control &&
        printf '#!/bin/sh\nuseradd -r hiuser && chown hiuser /usr/local/bin/hi\n' > p/DEBIAN/postinst && chmod 755 p/DEBIAN/postinst &&
        dpkg-deb -b p hi.deb && sudo dpkg -i hi.deb && hi && stat -c %U /usr/local/bin/hi && sudo dpkg -r keep-hi && sudo apt-get check";
    if machine.sh("command -v dpkg-deb").await.code == 0 {
        assert!(machine.ok(script).await.contains("\nhi\nhiuser\n"));
    } else {
        skipped("packages", "this host has no dpkg");
    }
}

async fn our_sudo_is_not_fooled(machine: &Machine) {
    let as_alice = |line: &str| format!("sudo -u alice -- bash -c '{line}'");
    // A user who is not named gets nowhere, whatever is put into arguments, names and environment.
    for line in [
        "sudo id",
        "exec -a keep-agent /usr/bin/sudo serve /tmp/s",
        "exec -a sudo /usr/bin/sudo -u root id",
        "SUDO_USER=root SUDO_UID=0 USER=ubuntu LOGNAME=ubuntu sudo id",
        "sudo -u alice id",
        "sudo -g root id",
        "sudo -i",
        "sudo -s id",
        "cd /tmp && ln -sf /usr/bin/sudo elsewhere && ./elsewhere id",
        "cd /tmp && cp /usr/bin/sudo copy && ./copy id",
        "LD_PRELOAD=/tmp/x.so sudo id",
        "sudo -l",
        "sudo -v",
        "exec 0<&- 1>&- 2>&-; sudo id > /tmp/got",
        "ulimit -n 3; sudo id",
    ] {
        let refused = machine.sh(&as_alice(line)).await;
        assert!(refused.code != 0 && !refused.out.contains("uid=0"), "{line}: {refused:?}");
    }
    machine.ok("test ! -s /tmp/got").await;

    // What the caller has open or set up does not reach the command.
    assert_eq!(
        machine.ok("exec 9</etc/passwd; sudo sh -c 'ls /proc/self/fd | wc -l'").await,
        "4\n"
    );
    assert_eq!(machine.ok("umask 0; sudo sh -c umask").await, "0022\n");
    assert_eq!(machine.ok("umask 077; sudo sh -c umask").await, "0077\n");
    let env = machine.ok("LD_PRELOAD=/tmp/x.so BASH_ENV=/tmp/y PYTHONPATH=/z sudo env").await;
    assert!(!env.contains("/tmp/x.so") && !env.contains("/tmp/y") && !env.contains("/z"), "{env}");
    let groups = "0<&- sudo -u alice id -G";
    assert_eq!(machine.ok(groups).await, machine.ok("id -G alice").await, "none of the caller's");
    machine.ok("exec 2>&-; sudo true").await;
    // Longer than a variable may be, and longer than a command may be.
    assert_eq!(machine.ok("sudo echo $(seq 60000) | wc -w").await, "60000\n");
    let long = machine.sh("sudo true $(seq 900000)").await;
    assert!(long.code != 0 && long.err.contains("Argument list too long"), "{:?}", long.code);
    // A command ends as itself, also by a signal.
    assert_eq!(machine.sh("sudo sh -c 'kill -TERM $$'").await.code, 143);
    assert_eq!(
        machine.sh("sudo sh -c 'yes | head -1 > /dev/null; echo ${PIPESTATUS:-0}'").await.code,
        0
    );
    // There is no way back from a user who was given.
    let back = "sudo -u alice perl -e '$> = 0; $< = 0; print \"$< $>\"'";
    assert!(!machine.sh(back).await.out.split(' ').any(|id| id == "0"));

    // The policy is root's word alone.
    machine.ok("sudo chmod 666 /etc/keep-sudo.users").await;
    let refused = machine.sh("sudo id").await;
    assert!(refused.code == 1 && refused.err.contains("not believed"), "{refused:?}");
    machine.root("chmod 644 /etc/keep-sudo.users && mv /etc/keep-sudo.users /tmp/u && ln -s /tmp/u /etc/keep-sudo.users").await;
    let refused = machine.sh("sudo id").await;
    assert!(refused.code == 1 && refused.err.contains("it is a link"), "{refused:?}");
    machine.root("rm /etc/keep-sudo.users").await;
    let refused = machine.sh("sudo id").await;
    assert!(refused.code == 1 && refused.err.contains("ubuntu may not"), "{refused:?}");
    assert_eq!(machine.root("sudo id -u").await, "0\n", "root always may");
}
