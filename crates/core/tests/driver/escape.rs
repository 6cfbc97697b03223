//! Attempts to get out of a container, or to take it down with oneself. Each must fail.
//!
//! What the sandbox's root tries, it tries through a real agent in a real cage. System calls are made
//! by number, from perl, with arguments that would mean something.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use sandkeep_core::driver::container::ContainerDriver;
use sandkeep_core::driver::{Driver, Machine};
use sandkeep_core::model::Size;
use sandkeep_testkit::driver::ContainerHost;
use sandkeep_testkit::inside::{Inside, userland};

const EPERM: i32 = 1;
const EACCES: i32 = 13;
const EROFS: i32 = 30;
const ENOSYS: i32 = 38;

struct Prison {
    inside: Inside,
    machine: Machine,
    driver: ContainerDriver,
    host: ContainerHost,
}

/// A machine with a shell, or the reason printed why this host cannot have one.
async fn prison(test: &str, change: impl FnOnce(&ContainerHost, &mut Machine)) -> Option<Prison> {
    let host = ContainerHost::new()
        .and_then(|host| userland(&host.layer("userland")).map(|()| host))
        .map_err(|why| eprintln!("SKIPPED {test}: {why}"))
        .ok()?;
    let mut machine = host.machine_on("prison", host.root("prison", &["userland"]));
    change(&host, &mut machine);
    let driver = host.driver();
    let link = driver.start(&machine).await.expect("it starts");
    let inside = Inside::reach(&link).await;
    Some(Prison { inside, machine, driver, host })
}

fn as_it_is(_: &ContainerHost, _: &mut Machine) {}

impl Prison {
    /// Makes a system call inside and returns the error, 0 for success. Arguments are perl.
    async fn errno(&self, number: u32, arguments: &str) -> i32 {
        let script = format!(
            "my $buf = \"\\0\" x 4096; my @a = ({arguments}); my $r = syscall({number}, @a); \
             print $r == -1 ? $!+0 : 0;"
        );
        let ran = self.inside.perl(&script).await;
        ran.out.parse().unwrap_or_else(|_| panic!("call {number}({arguments}): {ran:?}"))
    }

    /// Opens a file inside and returns the error, 0 for success.
    async fn open(&self, mode: &str, path: &str) -> i32 {
        let script = format!("print open(my $f, '{mode}', '{path}') ? 0 : $!+0;");
        self.inside.perl(&script).await.out.parse().expect("a number")
    }
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn dangerous_system_calls_are_denied() {
    let Some(prison) = prison("dangerous_system_calls_are_denied", as_it_is).await else { return };
    let nothing = "0, 0, 0, 0, 0";
    let denied = [
        ("mount", 165, "'none', '/tmp', 'tmpfs', 0, 0"),
        ("umount2", 166, "'/proc', 2"),
        ("pivot_root", 155, "'/tmp', '/tmp'"),
        ("open_tree", 428, "-100, '/', 1"),
        ("move_mount", 429, "-100, '/proc', -100, '/tmp', 0"),
        ("fsopen", 430, "'tmpfs', 0"),
        ("fsconfig", 431, nothing),
        ("fsmount", 432, nothing),
        ("fspick", 433, "-100, '/', 0"),
        ("mount_setattr", 442, "-100, '/', 0, $buf, 32"),
        ("setns", 308, "0, 0"),
        ("unshare NEWUSER", 272, "0x10000000"),
        ("unshare NEWNS", 272, "0x20000"),
        ("init_module", 175, "$buf, 4096, ''"),
        ("finit_module", 313, "0, '', 0"),
        ("delete_module", 176, "'ext4', 0"),
        ("kexec_load", 246, nothing),
        ("kexec_file_load", 320, nothing),
        ("reboot", 169, "0xfee1dead, 672274793, 0x1234567, 0"),
        ("swapon", 167, "'/tmp/swap', 0"),
        ("swapoff", 168, "'/tmp/swap'"),
        ("acct", 163, "'/tmp/acct'"),
        ("syslog", 103, "3, $buf, 4096"),
        ("quotactl", 179, "0, '/dev/vda', 0, $buf"),
        ("quotactl_fd", 443, nothing),
        ("nfsservctl", 180, nothing),
        ("settimeofday", 164, "$buf, 0"),
        ("clock_settime", 227, "0, $buf"),
        ("clock_adjtime", 305, "0, $buf"),
        ("adjtimex", 159, "$buf"),
        ("add_key", 248, "'user', 'name', 'x', 1, -3"),
        ("request_key", 249, "'user', 'name', 0, -3"),
        ("keyctl", 250, "0, -3, 1"),
        ("bpf", 321, "0, $buf, 128"),
        ("perf_event_open", 298, "$buf, 0, -1, -1, 0"),
        ("userfaultfd", 323, "0"),
        ("fanotify_init", 300, "0, 0"),
        ("fanotify_mark", 301, nothing),
        ("lookup_dcookie", 212, nothing),
        ("kcmp", 312, "1, $$, 0, 0, 0"),
        ("open_by_handle_at", 304, "-100, $buf, 0"),
        ("name_to_handle_at", 303, "-100, '/', $buf, $buf, 0"),
        ("iopl", 172, "3"),
        ("ioperm", 173, "0x70, 2, 1"),
        ("modify_ldt", 154, "0, $buf, 16"),
        ("move_pages", 279, nothing),
        ("mbind", 237, nothing),
        ("clone NEWUSER", 56, "0x10000011, 0, 0, 0, 0"),
        ("clone NEWNS", 56, "0x20011, 0, 0, 0, 0"),
        ("clone NEWPID", 56, "0x20000011, 0, 0, 0, 0"),
        ("clone NEWNET", 56, "0x40000011, 0, 0, 0, 0"),
        ("clone NEWIPC", 56, "0x8000011, 0, 0, 0, 0"),
        ("clone NEWUTS", 56, "0x4000011, 0, 0, 0, 0"),
        ("clone NEWCGROUP", 56, "0x2000011, 0, 0, 0, 0"),
        ("socket AF_PACKET", 41, "17, 3, 0"),
        ("socket AF_ALG", 41, "38, 5, 0"),
        ("socket AF_VSOCK", 41, "40, 1, 0"),
        ("socket AF_KEY", 41, "15, 3, 2"),
        ("socketpair AF_TIPC", 53, "30, 1, 0, $buf"),
        ("socket AF_INET, SOCK_PACKET", 41, "2, 10, 0x300"),
        ("socket AF_INET, SOCK_PACKET | SOCK_CLOEXEC", 41, "2, 0x8000a, 0x300"),
        ("socket AF_INET6, SOCK_PACKET", 41, "10, 10, 0x300"),
        ("socketpair AF_INET, SOCK_PACKET", 53, "2, 10, 0x300, $buf"),
        ("ioctl TIOCSETD", 16, "0, 0x5423, $buf"),
        ("ioctl TIOCSTI", 16, "0, 0x5412, $buf"),
        ("ioctl TIOCLINUX", 16, "0, 0x541c, $buf"),
        ("personality ADDR_NO_RANDOMIZE", 135, "0x40000"),
        ("personality READ_IMPLIES_EXEC", 135, "0x400000"),
    ];
    for (name, number, arguments) in denied {
        assert_eq!(prison.errno(number, arguments).await, EPERM, "{name}");
    }
    let absent = [
        ("clone3", 435),
        ("io_uring_setup", 425),
        ("io_uring_enter", 426),
        ("io_uring_register", 427),
        ("statmount", 457),
        ("listmount", 458),
        ("open_tree_attr", 467),
        ("a call of the future", 500),
        ("mount of the x32 ABI", 0x4000_0000 + 165),
    ];
    for (name, number) in absent {
        assert_eq!(prison.errno(number, "$buf, 88").await, ENOSYS, "{name}");
    }
    let allowed = [
        ("socket AF_UNIX", 41, "1, 1, 0"),
        ("socket AF_INET", 41, "2, 1, 0"),
        ("socket AF_INET, SOCK_RAW", 41, "2, 3, 1"),
        ("socket AF_NETLINK", 41, "16, 3, 0"),
        ("personality, asked for", 135, "0xffffffff"),
        ("getpid", 39, "0"),
    ];
    for (name, number, arguments) in allowed {
        assert_eq!(prison.errno(number, arguments).await, 0, "{name}");
    }
    let forked = prison.inside.perl("my $p = fork // exit 1; exit 0 if !$p; wait; print $?").await;
    assert_eq!(forked.out, "0", "plain processes are what it is for");
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn the_agent_cannot_be_looked_into_traced_or_killed() {
    let test = "the_agent_cannot_be_looked_into_traced_or_killed";
    let Some(prison) = prison(test, as_it_is).await else { return };
    for name in ["mem", "environ", "maps", "auxv", "syscall", "stack", "fdinfo/3"] {
        let error = prison.open("<", &format!("/proc/1/{name}")).await;
        assert!([EPERM, EACCES].contains(&error), "/proc/1/{name}: {error}");
    }
    for name in ["exe", "root", "cwd", "fd/3", "ns/mnt", "ns/user", "map_files"] {
        let script = format!(
            "print defined(readlink('/proc/1/{name}')) || opendir(my $d, '/proc/1/{name}') ? 0 : $!+0"
        );
        let ran = prison.inside.perl(&script).await;
        assert!(["1", "13"].contains(&ran.out.as_str()), "/proc/1/{name}: {ran:?}");
    }
    assert_eq!(prison.errno(101, "16, 1, 0, 0").await, EPERM, "ptrace attach");
    assert_eq!(prison.errno(101, "0x4206, 1, 0, 0").await, EPERM, "ptrace seize");
    let vector = "do { our $v = pack('QQ', unpack('Q', pack('p', $buf)), 8); $v }";
    let read = prison.errno(310, &format!("1, {vector}, 1, $v, 1, 0")).await;
    assert_eq!(read, EPERM, "process_vm_readv");
    let steal = prison
        .inside
        .perl(
            "my $p = syscall(434, 1, 0); my $r = syscall(438, $p, 3, 0); print $r == -1 ? $!+0 : 0",
        )
        .await;
    assert_eq!(steal.out, EPERM.to_string(), "pidfd_getfd of the link");

    for signal in ["KILL", "STOP", "TERM", "INT", "HUP", "SEGV", "ABRT"] {
        prison.inside.perl(&format!("kill '{signal}', 1")).await;
    }
    assert_eq!(prison.inside.sh("echo here").await.out, "here\n", "it goes on answering");
    // Tracing one's own children is what debuggers do.
    let own = "my $p = fork // exit 1; if (!$p) { sleep 100; exit } \
               my $r = syscall(101, 16, $p + 0, 0, 0); print $r; kill 'KILL', $p;";
    assert_eq!(prison.inside.perl(own).await.out, "0");
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn the_agents_limits_cannot_be_set() {
    let Some(prison) = prison("the_agents_limits_cannot_be_set", as_it_is).await else { return };
    // While a thread of the agent acts as a user, that user must not reach it either.
    let attempt = "my $zero = pack('QQ', 0, 0); my ($tried, @done) = (0); \
        for (1..200) { opendir(my $d, '/proc/1/task'); \
            for my $tid (grep { /^[0-9]+$/ } readdir $d) { \
            for my $resource (0, 2, 6, 7, 9) { $tried++; \
                my $r = syscall(302, $tid + 0, $resource, $zero, 0); \
                push @done, \"$tid:$resource\" if $r == 0; push @done, \"$tid:$!\" if $r != 0 && $! != 1 && $! != 3; \
            } } } print $tried >= 1000 ? 'tried' : $tried, \" @done\";";
    let busy = async {
        for _ in 0..20 {
            prison.inside.run(&["true"], Some("someone")).await;
        }
    };
    let root = prison.inside.perl(attempt);
    let words = ["perl", "-e", attempt];
    let someone = prison.inside.run(&words, Some("someone"));
    let (root, someone, ()) = tokio::join!(root, someone, busy);
    assert_eq!(root.out, "tried ", "{root:?}");
    assert_eq!(someone.out, "tried ", "{someone:?}");
    assert_eq!(prison.inside.sh("echo here").await.out, "here\n", "it goes on answering");
    // Limits of one's own processes are one's own.
    let own = "my $p = fork // exit 1; if (!$p) { sleep 100; exit } my $few = pack('QQ', 64, 64); \
               print syscall(302, $p + 0, 7, $few, 0); kill 'KILL', $p;";
    assert_eq!(prison.inside.perl(own).await.out, "0");
}

#[tokio::test]
async fn no_process_leaves_its_memory_in_a_core_file() {
    let test = "no_process_leaves_its_memory_in_a_core_file";
    let Some(prison) = prison(test, as_it_is).await else { return };
    for user in [None, Some("someone")] {
        let raise = ["sh", "-c", "ulimit -c unlimited"];
        assert_ne!(prison.inside.run(&raise, user).await.code, 0, "{user:?} raises the limit");
        let limit = "ulimit -c; ulimit -Hc; cat /proc/self/coredump_filter";
        let ran = prison.inside.run(&["sh", "-c", limit], user).await;
        assert_eq!(ran.out, "0\n0\n00000000\n", "{user:?}: {ran:?}");
        let crash = "cd /tmp; ulimit -c unlimited 2>/dev/null; SECRET=s3cret perl -e 'kill SEGV => $$'; \
                     ls /tmp /tmp/core* 2>/dev/null";
        let ran = prison.inside.run(&["sh", "-c", crash], user).await;
        assert!(!ran.out.contains("core"), "{user:?}: {ran:?}");
    }
}

#[tokio::test]
async fn nothing_of_the_host_or_of_other_layers_is_there() {
    let test = "nothing_of_the_host_or_of_other_layers_is_there";
    let plant = |host: &ContainerHost, _: &mut Machine| {
        fs::write(host.layer("foreign").join("marker-of-another"), "secret").unwrap();
        fs::write(host.path().join("marker-of-the-host"), "secret").unwrap();
    };
    let Some(prison) = prison(test, plant).await else { return };
    let top = prison.inside.sh("ls /").await.out;
    let expected = ["bin", "dev", "etc", "lib", "lib64", "proc", "run", "sys", "tmp"];
    assert_eq!(top.lines().collect::<Vec<_>>(), expected);
    let search = "my @todo = ('/'); while (defined(my $d = pop @todo)) { \
        opendir(my $h, $d) or next; for (readdir $h) { next if /^\\.\\.?$/; my $p = \"$d/$_\"; \
        print \"$p\\n\" if /marker-of|agent\\.sock|machine\\.json/; \
        push @todo, $p if -d $p && !-l $p && $p !~ m{^/+proc/\\d} } }";
    assert_eq!(prison.inside.perl(search).await.out, "", "neither marker nor socket is found");

    let outside = prison.host.path().to_str().unwrap().to_owned();
    let mounts = prison.inside.sh("cat /proc/self/mountinfo /proc/self/cgroup").await.out;
    assert!(!mounts.contains(&outside), "no path of the host is told: {mounts}");
    assert!(!mounts.contains("sandkeep"), "nor its place in the control groups: {mounts}");
    let sockets = prison.inside.sh("cat /proc/net/unix").await.out;
    assert!(!sockets.contains('/') && !sockets.contains('@'), "nor any socket of its: {sockets}");

    // The old trick: a directory descriptor from before a second chroot.
    let climb = "mkdir '/tmp/x'; chdir '/'; opendir(my $d, '/'); chroot '/tmp/x' or die; \
                 chdir $d; chdir '..' for 1..100; chroot '.'; print -e '/marker-of-the-host' ? 1 : 0; \
                 opendir($d, '/'); print join ' ', readdir $d;";
    let climbed = prison.inside.perl(climb).await.out;
    assert!(climbed.starts_with('0') && climbed.contains("bin"), "{climbed}");
}

#[tokio::test]
async fn the_kernels_knobs_cannot_be_turned() {
    let Some(prison) = prison("the_kernels_knobs_cannot_be_turned", as_it_is).await else { return };
    for path in [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/drop_caches",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/irq/default_smp_affinity",
        "/sys/class/net/lo/mtu",
        "/sys/devices/system/cpu/cpu1/online",
    ] {
        let error = prison.open(">", path).await;
        let absent = error == 2 && path.starts_with("/sys");
        assert!(absent || [EROFS, EACCES].contains(&error), "{path}: {error}");
    }
    for path in ["kcore", "keys", "kmsg", "kallsyms", "timer_list", "sched_debug"] {
        let ran = prison.inside.sh(&format!("head -c 100 /proc/{path} 2>/dev/null | wc -c")).await;
        assert_eq!(ran.out.trim(), "0", "/proc/{path}");
    }
    for path in ["/sys/firmware", "/sys/kernel", "/proc/acpi", "/proc/scsi"] {
        assert_eq!(prison.inside.sh(&format!("ls {path} 2>/dev/null")).await.out, "", "{path}");
    }
    // Masks and mounts stay where they are.
    for script in [
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /proc/sys",
        "mount --bind /bin /tmp",
        "rm -rf /dev/null",
        "mv /proc /proc2",
        "echo b > /proc/sys/kernel/sysrq",
    ] {
        assert_ne!(prison.inside.sh(script).await.code, 0, "{script}");
    }
}

/// Tries, on everything it sees of its limits, all that would change it, and prints what succeeds.
const CHANGES: &str = r#"
    my @files = map { "/proc/$_" } qw(meminfo stat loadavg cpuinfo uptime);
    push @files, '/sys/devices/system/cpu/online';
    my (@todo, @dirs) = ('/sys/fs');
    while (defined(my $d = pop @todo)) {
        push @dirs, $d;
        print "made a directory in $d\n" if mkdir "$d/own";
        print "made a file in $d\n" if open(my $f, '>', "$d/own");
        opendir(my $h, $d) or next;
        for (readdir $h) {
            next if /^\.\.?$/;
            my $p = "$d/$_";
            if (-d $p && !-l $p) { push @todo, $p } else { push @files, $p }
        }
    }
    for my $p (@files) {
        for my $mode ('>', '>>', '+<') { print "opened $p\n" if open(my $f, $mode, $p) && syswrite($f, "1\n") }
        print "changed the mode of $p\n" if chmod 0777, $p;
        print "took $p\n" if chown 1000, 1000, $p;
        print "touched $p\n" if utime 1, 1, $p;
        print "cut $p\n" if truncate $p, 0;
        print "removed $p\n" if unlink $p;
        print "moved $p\n" if rename $p, '/tmp/moved';
        print "linked $p\n" if link $p, '/tmp/linked';
        print "unmounted $p\n" if syscall(166, $p, 2) == 0;
    }
    my ($none, $type) = ('none', '');
    for (@dirs, '/sys', '/proc') {
        my $p = $_;
        print "unmounted $p\n" if syscall(166, $p, 2) == 0;
        print "made $p writable\n" if syscall(165, $none, $p, $type, 4096 | 32, 0) == 0;
    }
    print "set the clock back\n" if open(my $f, '>', '/proc/self/timens_offsets') && syswrite($f, "boottime 5 0\n");
    print scalar(@files) > 20 ? 'tried' : "only @files";
"#;

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn what_it_sees_of_its_limits_cannot_be_changed() {
    let test = "what_it_sees_of_its_limits_cannot_be_changed";
    let few = |_: &ContainerHost, machine: &mut Machine| machine.limits.millicpus = 500;
    let Some(prison) = prison(test, few).await else { return };
    let before = prison.inside.sh("cat /proc/self/mounts").await.out;
    let ran = prison.inside.perl(CHANGES).await;
    assert_eq!(ran.out, "tried", "{ran:?}");
    assert_eq!(prison.inside.sh("cat /proc/self/mounts").await.out, before);
    for line in
        before.lines().filter(|line| line.contains(" /sys/fs") || line.contains(" /proc/meminfo"))
    {
        assert!(line.split(' ').nth(3).is_some_and(|flags| flags.starts_with("ro,")), "{line}");
    }

    // Its own groups and no other: nothing beside them, below or above.
    assert_eq!(prison.inside.sh("ls /sys/fs").await.out, "cgroup\n");
    let beyond = "for d in /sys/fs/cgroup /sys/fs/cgroup/*/; do cd -P $d && ls -d */; done 2>/dev/null; true";
    let found = prison.inside.sh(beyond).await.out;
    let controllers = ["cpu", "cpuacct", "cpuset", "memory", "pids"];
    for name in found.lines() {
        let all = name.trim_end_matches('/').split(',').all(|name| controllers.contains(&name));
        assert!(all, "{found}");
    }
    let above = "for d in /sys/fs/cgroup/memory /sys/fs/cgroup; do cd -P $d 2>/dev/null && ls -d ../*; done; true";
    let above = prison.inside.sh(above).await.out;
    assert!(above.lines().all(|name| !name.contains("sandkeep")), "{above}");
    let paths = prison.inside.sh("cat /proc/self/cgroup /proc/self/mountinfo").await.out;
    assert!(!paths.contains(prison.machine.key.as_str()), "{paths}");
    assert!(!paths.contains("sandkeep-test"), "{paths}");
    // Processes of others are not listed.
    let listed = "my $own = 0; for my $p (map { \"/sys/fs/cgroup/$_/cgroup.procs\" } qw(. cpu cpuacct cpuset memory pids)) { \
        open(my $f, '<', $p) or next; while (<$f>) { chomp; $own += $_ == $$; print \"$_ \" unless -d \"/proc/$_\" } } \
        print $own > 0 ? 'own' : 'none';";
    assert_eq!(prison.inside.perl(listed).await.out, "own");
    prison.driver.stop(&prison.machine.key).await.expect("it stops");
}

#[tokio::test]
async fn devices_are_the_harmless_ones_and_no_others_can_be_made() {
    let test = "devices_are_the_harmless_ones_and_no_others_can_be_made";
    // An image could bring devices along: those of a disk and of the machine's memory.
    let plant = |host: &ContainerHost, _: &mut Machine| {
        let place = host.layer("userland");
        for (name, kind, device) in [
            ("disk", FileType::BlockDevice, device_of(Path::new("/"))),
            ("memory", FileType::CharacterDevice, makedev(1, 1)),
            ("null", FileType::CharacterDevice, makedev(1, 3)),
        ] {
            let mode = Mode::from_raw_mode(0o666);
            mknodat(CWD, place.join(name), kind, mode, device).unwrap();
        }
    };
    let Some(prison) = prison(test, plant).await else { return };
    let listed = prison.inside.sh("ls /dev").await.out;
    assert_eq!(
        listed.split_whitespace().collect::<Vec<_>>(),
        [
            "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
            "tty", "urandom", "zero"
        ]
    );
    for name in ["/disk", "/memory", "/null"] {
        assert_eq!(prison.open("<", name).await, EACCES, "{name}");
    }
    for arguments in ["/tmp/d b 8 0", "/tmp/d c 1 1", "/dev/d c 1 3", "/dev/shm/d c 1 3"] {
        assert_ne!(prison.inside.sh(&format!("mknod {arguments}")).await.code, 0, "{arguments}");
    }
    assert_eq!(prison.inside.sh("mknod /tmp/pipe p && echo hi > /dev/null").await.code, 0);
}

#[tokio::test]
async fn set_user_id_programs_work_inside_and_gain_nothing_outside() {
    let test = "set_user_id_programs_work_inside_and_gain_nothing_outside";
    let plant = |host: &ContainerHost, _: &mut Machine| {
        let bin = host.layer("userland").join("bin");
        for name in ["id", "sleep"] {
            fs::copy(bin.join(name), bin.join(format!("su-{name}"))).unwrap();
            let path = bin.join(format!("su-{name}"));
            fs::set_permissions(path, fs::Permissions::from_mode(0o4755)).unwrap();
        }
    };
    let Some(prison) = prison(test, plant).await else { return };
    let someone = Some("someone");
    assert_eq!(prison.inside.run(&["su-id", "-u"], someone).await.out, "0\n");
    assert_eq!(prison.inside.run(&["id", "-u"], someone).await.out, "1000\n");
    let status = prison.inside.sh("cat /proc/self/status").await.out;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).unwrap_or_default().to_owned()
    };
    assert_eq!(field("NoNewPrivs"), "0");
    assert_eq!(field("Seccomp:"), "2");
    assert_eq!(field("CapBnd"), "00000000a80425fb");
    assert_eq!(field("CapEff"), "00000000a80425fb");

    // On the host, root inside is an ordinary number.
    let _sleeping = prison.inside.start(&["su-sleep", "1000"], someone).await;
    let (base, count) = (prison.machine.uids.base, prison.machine.uids.count);
    let ours = || {
        let statuses = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("status")).ok());
        statuses.filter(|text| text.starts_with("Name:\tsu-sleep\n")).find_map(|text| {
            let line = text.lines().find(|line| line.starts_with("Uid:"))?.to_owned();
            let ids: Vec<u32> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
            ids.iter().all(|id| (base..base + count).contains(id)).then_some(ids)
        })
    };
    let mut found = ours();
    while found.is_none() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        found = ours();
    }
    assert_eq!(found, Some(vec![base + 1000, base, base, base]));
}

#[tokio::test]
async fn a_fork_bomb_meets_its_limit_and_the_agent_lives() {
    let test = "a_fork_bomb_meets_its_limit_and_the_agent_lives";
    let few = |_: &ContainerHost, machine: &mut Machine| machine.limits.pids = 50;
    let Some(prison) = prison(test, few).await else { return };
    let bomb = "my $n = 0; while ($n < 1000) { my $p = fork; last if !defined $p; \
                if (!$p) { sleep 1000; exit } $n++; push @all, $p } print $n; kill 'KILL', @all; \
                wait for @all;";
    let count: u32 = prison.inside.perl(bomb).await.out.parse().expect("a number");
    assert!((20..50).contains(&count), "{count} processes");
    assert_eq!(prison.inside.sh("echo here").await.out, "here\n");
}

#[tokio::test]
async fn a_memory_bomb_dies_alone() {
    let small = |_: &ContainerHost, machine: &mut Machine| machine.limits.memory = Size(48 << 20);
    let Some(prison) = prison("a_memory_bomb_dies_alone", small).await else { return };
    let ran = prison.inside.perl("my @all; push @all, 'x' x 1_000_000 while 1;").await;
    assert_eq!(ran.code, 137, "{ran:?}");
    assert_eq!(prison.inside.sh("echo here").await.out, "here\n", "the agent was not chosen");
    // Many small ones. They are chosen first by what the agent marked them with, not by size.
    // It carries the mark itself only while it starts one, so it may take a moment to see it without.
    let scores = "while [ $(cat /proc/1/oom_score_adj) != 0 ]; do sleep 0.01; done; \
                  cat /proc/self/oom_score_adj";
    assert_eq!(prison.inside.sh(scores).await.out, "300\n");
    let swarm =
        "for (1..60) { if (!fork) { my $x = 'x' x 900_000; sleep 3; exit } } wait for 1..60;";
    prison.inside.perl(swarm).await;
    assert_eq!(prison.inside.sh("echo here").await.out, "here\n", "nor then");
    let usage = prison.driver.stop(&prison.machine.key).await.expect("it stops");
    assert!(usage.oom_kills > 0, "{usage:?}");
    assert!(usage.memory_peak.0 <= 48 << 20, "{usage:?}");
}

#[tokio::test]
async fn files_do_not_grow_over_their_limit() {
    let short = |_: &ContainerHost, machine: &mut Machine| machine.limits.file_size = Size(1 << 20);
    let Some(prison) = prison("files_do_not_grow_over_their_limit", short).await else { return };
    let ran = prison.inside.sh("dd if=/dev/zero of=/tmp/big bs=64k count=100").await;
    assert_ne!(ran.code, 0, "{ran:?}");
    assert_eq!(prison.inside.sh("stat -c %s /tmp/big").await.out.trim(), "1048576");
}

#[tokio::test]
async fn sandboxes_do_not_see_each_other() {
    let Some(prison) = prison("sandboxes_do_not_see_each_other", as_it_is).await else { return };
    let other = prison.host.machine_on("other", prison.host.root("other", &["userland"]));
    let link = prison.driver.start(&other).await.expect("it starts");
    let neighbour = Inside::reach(&link).await;
    let listen = "socket(my $s, 2, 1, 0); bind($s, pack('Sna4x8', 2, 5000, \"\\x7f\\0\\0\\1\")); \
                  listen($s, 5); $| = 1; print 'up'; sleep 1000;";
    let mut server = prison.inside.start(&["perl", "-e", listen], None).await;
    server.next().await.expect("it listens");
    let connect = "socket(my $s, 2, 1, 0); \
                   print connect($s, pack('Sna4x8', 2, 5000, \"\\x7f\\0\\0\\1\")) ? 0 : $!+0;";
    assert_eq!(prison.inside.perl(connect).await.out, "0", "its own loopback works");
    assert_eq!(neighbour.perl(connect).await.out, "111", "and is its own");
    let seen = neighbour.run(&["ls", "/proc"], None).await.out;
    let processes = seen.lines().filter(|name| name.parse::<u32>().is_ok()).count();
    assert_eq!(processes, 2, "the agent and `ls`: {seen}");
    prison.inside.sh("echo mine > /tmp/mine; echo mine > /dev/shm/mine").await;
    assert_eq!(neighbour.sh("cat /tmp/mine /dev/shm/mine").await.out, "");
}

/// The number of the disk a path is on.
fn device_of(path: &Path) -> u64 {
    rustix::fs::stat(path).expect("a path that is there").st_dev
}
