//! The limits of a container hold: what its processes try to use beyond them they do not get.

use std::fs;
use std::time::{Duration, Instant};

use sandkeep_core::driver::container::ContainerDriver;
use sandkeep_core::driver::{Driver, Machine};
use sandkeep_core::guest::{Output, OutputEvent};
use sandkeep_core::model::Size;
use sandkeep_testkit::driver::ContainerHost;
use sandkeep_testkit::inside::{Inside, userland};

struct Limited {
    inside: Inside,
    machine: Machine,
    driver: ContainerDriver,
    host: ContainerHost,
}

/// A machine with a shell and as much memory, or the reason printed why this host cannot have one.
async fn limited(test: &str, memory: u64) -> Option<Limited> {
    let host = ContainerHost::new()
        .and_then(|host| userland(&host.layer("userland")).map(|()| host))
        .map_err(|why| eprintln!("SKIPPED {test}: {why}"))
        .ok()?;
    let mut machine = host.machine_on("limited", host.root("limited", &["userland"]));
    machine.limits.memory = Size(memory);
    let driver = host.driver();
    let link = driver.start(&machine).await.expect("it starts");
    let inside = Inside::reach(&link).await;
    Some(Limited { inside, machine, driver, host })
}

/// Queues as much as the kernel takes in 150 sockets without a reader, then counts what really
/// arrived.
const TCP: &str = r#"
    my ($sum, $l, $c, $s, @kept) = (0);
    my $address = pack('S n a4 x8', 2, 7000, "\x7f\0\0\1");
    socket($l, 2, 1, 0) && bind($l, $address) && listen($l, 1000) or die "listen: $!";
    for (1..150) {
        ($c, $s) = ();
        socket($c, 2, 1, 0) && connect($c, $address) && accept($s, $l) or die "connect: $!";
        fcntl($c, 4, 2048);
        push @kept, $c, $s;
        while (my $written = syswrite($c, 'x' x 65536)) { $sum += $written }
    }
    print $sum;
"#;
const UDP: &str = r#"
    my ($sum, $r, $c, @kept) = (0);
    for (1..600) {
        ($r, $c) = ();
        my $address = pack('S n a4 x8', 2, 7000 + $_, "\x7f\0\0\1");
        socket($r, 2, 2, 0) && bind($r, $address) or die "bind: $!";
        setsockopt($r, 1, 8, pack('i', 1 << 20));
        socket($c, 2, 2, 0) or die "socket: $!";
        fcntl($_, 4, 2048) for ($r, $c);
        push @kept, $r;
        send($c, 'x' x 32768, 0, $address) for (1..16);
    }
    for my $socket (@kept) {
        while (defined recv($socket, my $got, 65536, 0)) { $sum += length $got }
    }
    print $sum;
"#;

#[tokio::test]
async fn sockets_queue_no_more_than_the_memory_limit() {
    let test = "sockets_queue_no_more_than_the_memory_limit";
    const MEMORY: u64 = 64 << 20;
    let Some(limited) = limited(test, MEMORY).await else { return };
    for (name, script) in [("TCP", TCP), ("UDP", UDP)] {
        let ran = limited.inside.perl(script).await;
        // Where sockets count as memory the command may be ended for it.
        let queued = if ran.code == 137 { 0 } else { ran.out.parse().unwrap_or(u64::MAX) };
        assert!(queued <= MEMORY, "{name}: {queued} bytes in a sandbox of {MEMORY}: {ran:?}");
        if ran.code == 0 {
            assert!(queued > 1 << 20, "{name}: an honest program can queue something: {ran:?}");
        }
    }
    // The limit bounds what is queued; it breaks nothing.
    let echo = r#"
        my $address = pack('S n a4 x8', 2, 6999, "\x7f\0\0\1");
        my ($l, $c, $s, $sum) = (undef, undef, undef, 0);
        socket($l, 2, 1, 0) && bind($l, $address) && listen($l, 1) or die "listen: $!";
        if (!fork) { socket($c, 2, 1, 0); connect($c, $address); syswrite($c, 'x' x 65536) for (1..512); exit }
        accept($s, $l) or die "accept: $!";
        while (my $read = sysread($s, my $buffer, 65536)) { $sum += $read }
        print $sum;
    "#;
    assert_eq!(limited.inside.perl(echo).await.out, (32 << 20).to_string());
    limited.driver.stop(&limited.machine.key).await.expect("it stops");
}

impl Limited {
    /// How often the agent has waited for something.
    fn waits(&self) -> u64 {
        let record = self.host.config().run_dir.join("limited/machine.json");
        let record = fs::read(record).expect("a record of the machine");
        let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
        let status = fs::read_to_string(format!("/proc/{}/status", record["pid"]));
        let status = status.expect("the agent lives");
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.and_then(|count| count.trim().parse().ok()).expect("a number")
    }

    /// Waits until the agent has slept for so long without a break.
    async fn sleeps(&self, how_long: Duration, what: &str) {
        let deadline = Instant::now() + Duration::from_secs(120);
        let (mut since, mut waits) = (Instant::now(), self.waits());
        while since.elapsed() < how_long {
            assert!(Instant::now() < deadline, "{what}: the agent is woken again and again");
            tokio::time::sleep(Duration::from_millis(50)).await;
            let now = self.waits();
            if now != waits {
                (since, waits) = (Instant::now(), now);
            }
        }
    }
}

#[tokio::test]
async fn a_sandbox_that_does_nothing_is_left_alone() {
    let test = "a_sandbox_that_does_nothing_is_left_alone";
    let Some(limited) = limited(test, 64 << 20).await else { return };
    assert_eq!(limited.inside.sh("true").await.code, 0);
    limited.sleeps(Duration::from_secs(4), "without processes").await;
    // One that waits: what it sees of its limits is brought up to date less and less often.
    let left = "sleep 1000 < /dev/null > /dev/null 2>&1 &";
    assert_eq!(limited.inside.sh(left).await.code, 0);
    limited.sleeps(Duration::from_secs(6), "with a process that waits").await;
    limited.driver.stop(&limited.machine.key).await.expect("it stops");
}

/// Takes what the kernel gives of something, then waits for a line: how many were taken.
const INOTIFY: &str = r#"
    my $taken = 0;
    # From several users: a limit for each of them is none.
    for my $uid (0, 1000, 1001) {
        my $pid = open(my $out, '-|') // die "fork: $!";
        if (!$pid) {
            $> = $uid;
            my $count = 0;
            $count++ while $count < 100_000 && syscall(294, 0) >= 0;
            $| = 1;
            print "$count\n";
            sleep 1000;
        }
        $taken += <$out>;
        push @kept, $out;
    }
    $| = 1;
    print "$taken\n";
    sleep 1000;
"#;
const QUEUES: &str = r#"
    my ($taken, $name) = (0);
    # 10 messages of 8 KiB each.
    my $attributes = pack('q8', 0, 10, 8192, 0, 0, 0, 0, 0);
    for (;;) {
        $name = "q$taken";
        last if $taken > 1000 || syscall(240, $name, 0102, 0600, $attributes) < 0;
        $taken++;
    }
    $| = 1;
    print "$taken\n";
    sleep 1000;
"#;

async fn first_line(output: &mut Output) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        match output.next().await.expect("the agent answers") {
            OutputEvent::Stdout(bytes) => line.extend_from_slice(&bytes),
            other => panic!("{other:?} after {line:?}"),
        }
    }
    String::from_utf8(line).expect("text").trim().to_owned()
}

/// The kernel charges these to the user who made the namespace as well. If that was host root, what one sandbox takes is missing in all
/// others, and on the host.
#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn a_sandbox_cannot_use_up_what_others_need() {
    let test = "a_sandbox_cannot_use_up_what_others_need";
    let Some(limited) = limited(test, 256 << 20).await else { return };
    let neighbour = limited.host.machine_on("other", limited.host.root("other", &["userland"]));
    let link = limited.driver.start(&neighbour).await.expect("it starts");
    let other = Inside::reach(&link).await;
    for (what, script) in [("inotify instances", INOTIFY), ("message queues", QUEUES)] {
        let mut greedy = limited.inside.start(&["perl", "-e", script], None).await;
        let taken: u32 = first_line(&mut greedy).await.parse().expect("a number");
        assert!(taken > 0, "{what}: some are to be had");
        let mut second = other.start(&["perl", "-e", script], None).await;
        let left: u32 = first_line(&mut second).await.parse().expect("a number");
        assert_eq!(left, taken, "{what}: another sandbox has as many");
        if what == "inotify instances" {
            let host = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC);
            assert!(host.is_ok(), "{what}: the host has its own: {host:?}");
        }
    }
}
