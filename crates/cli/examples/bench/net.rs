//! The network: how fast bytes get out of a sandbox and into it, beside loopback and beside what else gives a namespace
//! a network without touching the host's.
//!
//! One server on the host's loopback holds the clock; one script is its client everywhere. Rounds are interleaved, and
//! the median counts, so that what the machine does meanwhile falls on all alike.

use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{Bench, Outcome};

const CLIENT: &str = include_str!("net.pl");
const PIECE: usize = 256 * 1024;

/// What is measured: its name, the script's arguments, connections, bytes of each.
const TASKS: [(&str, &str, u64, u64); 4] = [
    ("one stream out, MB/s", "send", 1, 1 << 30),
    ("one stream in, MB/s", "receive", 1, 1 << 30),
    ("200 streams in, MB/s", "many", 200, 4 << 20),
    ("connections one after another, per second", "dial", 500, 1),
];

/// A server that keeps the time of what it is asked for.
pub(crate) struct Server {
    pub(crate) port: u16,
    times: Receiver<(Instant, Instant)>,
}

impl Server {
    pub(crate) fn start() -> Outcome<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let (sender, times) = channel();
        thread::spawn(move || {
            for peer in listener.incoming().flatten() {
                let sender = sender.clone();
                thread::spawn(move || serve(peer, &sender));
            }
        });
        Ok(Self { port, times })
    }

    /// How long all of these took together, from the first's beginning to the last's end.
    fn took(&self, connections: u64) -> Outcome<Duration> {
        let mut all = Vec::new();
        for _ in 0..connections {
            all.push(self.times.recv_timeout(Duration::from_secs(60))?);
        }
        let first = all.iter().map(|(began, _)| *began).min();
        let last = all.iter().map(|(_, ended)| *ended).max();
        first.zip(last).map(|(first, last)| last - first).ok_or_else(|| "nobody came".into())
    }
}

fn serve(mut peer: TcpStream, times: &Sender<(Instant, Instant)>) -> Option<()> {
    let began = Instant::now();
    peer.set_nodelay(true).ok()?;
    let mut order = [0; 9];
    peer.read_exact(&mut order).ok()?;
    let mut left = usize::try_from(u64::from_be_bytes(order[1..].try_into().ok()?)).ok()?;
    let mut piece = vec![0; PIECE];
    if order[0] == b'S' {
        while left > 0 {
            let read = peer.read(&mut piece[..left.min(PIECE)]).ok().filter(|read| *read > 0)?;
            left -= read;
        }
        peer.write_all(b"x").ok()?;
    } else {
        while left > 0 {
            left -= peer.write(&piece[..left.min(PIECE)]).ok()?;
        }
        peer.read_exact(&mut piece[..1]).ok()?;
    }
    times.send((began, Instant::now())).ok()
}

/// Somebody whose network is measured.
enum Contender<'a> {
    Loopback,
    Sandbox(&'a Bench),
    Namespace(Namespace),
}

/// A network namespace, and who answers for it.
struct Namespace {
    holder: Child,
    carrier: Child,
}

impl Drop for Namespace {
    fn drop(&mut self) {
        for child in [&mut self.carrier, &mut self.holder] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Namespace {
    fn slirp(script: &Path, port: u16) -> Outcome<Self> {
        let holder = Command::new("unshare").args(["--net", "sleep", "1000"]).spawn()?;
        let ours = std::fs::read_link("/proc/self/ns/net")?;
        let theirs = format!("/proc/{}/ns/net", holder.id());
        wait_for("a namespace", || std::fs::read_link(&theirs).is_ok_and(|link| link != ours))?;
        let carrier = Command::new("slirp4netns")
            .args(["--configure", "--mtu=65520", &holder.id().to_string(), "tap0"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let namespace = Self { holder, carrier };
        wait_for("slirp4netns", || {
            let probe = namespace.client(script, &["10.0.2.2", &port.to_string(), "none"]).status();
            let routed = Command::new("nsenter")
                .args(["-t", &namespace.holder.id().to_string(), "-n", "ip", "route", "get"])
                .arg("10.0.2.2")
                .stderr(Stdio::null())
                .stdout(Stdio::null())
                .status();
            probe.is_ok() && routed.is_ok_and(|status| status.success())
        })?;
        Ok(namespace)
    }

    fn client(&self, script: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holder.id().to_string(), "-n", "perl"]);
        command.arg(script).args(arguments);
        command
    }
}

impl Contender<'_> {
    /// Where it finds the host's loopback.
    fn host(&self) -> &'static str {
        match self {
            Self::Loopback => "127.0.0.1",
            Self::Sandbox(_) => "100.97.0.1",
            Self::Namespace(_) => "10.0.2.2",
        }
    }

    async fn run(&self, script: &Path, arguments: &[&str]) -> Outcome<()> {
        let mut command = match self {
            Self::Loopback => {
                let mut command = Command::new("perl");
                command.arg(script).args(arguments);
                command
            }
            Self::Namespace(namespace) => namespace.client(script, arguments),
            Self::Sandbox(bench) => {
                let mut argv = vec!["/bin/perl", "-e", CLIENT];
                argv.extend(arguments);
                return bench.run("net", &argv).await;
            }
        };
        match command.status()?.success() {
            true => Ok(()),
            false => Err(format!("{command:?} failed").into()),
        }
    }
}

/// Measures all, and returns a table of their medians.
pub(crate) async fn run(
    bench: &Bench,
    server: &Server,
    scratch: &Path,
    peers: bool,
    rounds: usize,
) -> Outcome<String> {
    let script = scratch.join("net.pl");
    std::fs::write(&script, CLIENT)?;
    bench.create("net").await?;
    let mut contenders =
        vec![("loopback", Contender::Loopback), ("sandbox", Contender::Sandbox(bench))];
    if peers {
        let slirp = Namespace::slirp(&script, server.port)?;
        contenders.push(("slirp4netns", Contender::Namespace(slirp)));
    }
    let port = server.port.to_string();
    let mut table = String::from("| network |");
    for (name, _) in &contenders {
        table += &format!(" {name} |");
    }
    table += " loopback ÷ sandbox |\n|---|";
    table += &"---|".repeat(contenders.len() + 1);
    for (what, argument, connections, bytes) in TASKS {
        let mut times = vec![Vec::new(); contenders.len()];
        for _ in 0..rounds {
            for (at, (_, contender)) in contenders.iter().enumerate() {
                let (count, size) = (connections.to_string(), bytes.to_string());
                let arguments = [contender.host(), &port, argument, &count, &size];
                contender.run(&script, &arguments).await?;
                times[at].push(server.took(connections)?);
            }
        }
        let rate = |times: &mut Vec<Duration>| {
            times.sort();
            let median = times[times.len() / 2].as_secs_f64();
            let amount =
                if bytes == 1 { connections as f64 } else { (connections * bytes) as f64 / 1e6 };
            amount / median
        };
        let rates: Vec<f64> = times.iter_mut().map(rate).collect();
        table += &format!("\n| {what} |");
        for rate in &rates {
            table += &format!(" {rate:.0} |");
        }
        table += &format!(" {:.1} |", rates[0] / rates[1]);
        let _ = writeln!(std::io::stderr(), "{what}: {rates:.0?}");
    }
    bench.client.delete("net", None).await?;
    Ok(table)
}

fn wait_for(what: &str, mut ready: impl FnMut() -> bool) -> Outcome<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !ready() {
        if Instant::now() > deadline {
            return Err(format!("{what} does not come up").into());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
