//! Runs programs of the host, confined. Nothing else in the daemon does.
//!
//! A helper (`mkfs.erofs`, `mkfs.ext4`, ...) reads data that sandboxes wrote, so it must be assumed to be compromised by its input.
//! [`Helpers::run`] runs it through `keep-agent confine` (`crates/agent/src/helper/`): with its own uid and namespaces, without
//! network, with a system call filter, a read-only view of its input, an environment of only `PATH` and `LANG`, and limits on
//! memory, CPU time, file size and run time. `docs/SECURITY.md` has the full list.
//!
//! `crates/core/tests/driver/helpers.rs` rejects any other `Command::new` in the daemon's code, except for a list with reasons, and
//! inspects every process of a daemon under load.

use std::collections::BTreeMap;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use parking_lot::Mutex;
use sandkeep_proto::helper::{End, Helper, MARK, VERSION};
pub(crate) use sandkeep_proto::helper::{INPUT, Input, Limits as HelperLimits, OUTPUT};

use super::uid_claims::UidClaims;
use super::{broken, failed};
use crate::driver::{DriverError, DriverResult};

/// Where programs are that helpers may be.
const PLACES: [&str; 4] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
/// The first of the uids that helpers may have; see [`UidClaims`].
const FIRST_UID: u32 = 0xF000_0000;
/// How many a daemon claims: as many as are shifted in the view of a layer.
const CLAIMED: u32 = sandkeep_proto::helper::SHIFTED;
/// How many daemons there are uids for.
const DAEMONS: u32 = 256;
/// What is kept of what a helper prints, of its beginning on standard output and of its end on standard error.
const KEPT: usize = 64 << 10;

/// What most helpers may use.
pub(crate) const DEFAULT_LIMITS: HelperLimits =
    HelperLimits { memory: 4 << 30, stack: 8 << 20, cpu: 120, file_size: 1 << 30, deadline: 300 };

/// A program to be run.
#[derive(Debug)]
pub(crate) struct HelperTask<'a> {
    /// Its name, to be found among the host's programs, or [`INPUT`].
    pub(crate) program: &'a str,
    pub(crate) args: &'a [&'a str],
    /// Variables that it needs besides `PATH` and `LANG`.
    pub(crate) env: &'a [(&'a str, &'a str)],
    pub(crate) input: Input,
    /// The existing file that it writes to.
    pub(crate) output: Option<&'a Path>,
    pub(crate) limits: HelperLimits,
}

/// Runs helpers for a data directory.
#[derive(Debug)]
pub(crate) struct Helpers {
    agent: PathBuf,
    claims: UidClaims,
    uid: Mutex<Option<u32>>,
}

impl Helpers {
    /// With the `keep-agent` program, for the data directory, or a part of it, at `owner`.
    pub(crate) fn new(agent: PathBuf, owner: &Path) -> Self {
        Self { agent, claims: UidClaims::of(owner, CLAIMED), uid: Mutex::default() }
    }

    /// Runs a helper and answers with what it printed. Blocks, for no longer than its deadline and a moment.
    ///
    /// # Errors
    ///
    /// Returns [`DriverError::Unsupported`] when the program is not installed, and
    /// [`DriverError::Build`] with its last output when it fails.
    pub(crate) fn run(&self, task: &HelperTask<'_>) -> DriverResult<String> {
        self.attempt(task)?.map_err(|how| broken(&step_of(task), &how))
    }

    /// The same, but returns a failure of the program separately, with its cause, because the input
    /// may have caused it.
    pub(crate) fn attempt(&self, task: &HelperTask<'_>) -> DriverResult<Result<String, String>> {
        let (end, printed, said) = self.end_of(task)?;
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let told = |how: String| if last.is_empty() { how } else { format!("{how}: {last}") };
        match end {
            End::Exited(0) => Ok(Ok(printed)),
            End::Exited(code) => Ok(Err(told(format!("it ended with status {code}")))),
            End::Signalled(signal) => Ok(Err(told(format!("it was ended by signal {signal}")))),
            End::TimedOut => {
                let how = format!("it took longer than {} s", task.limits.deadline);
                Err(broken(&step_of(task), &told(how)))
            }
            End::Failed { step, reason } => {
                Err(broken(&step_of(task), &format!("could not {step}: {reason}")))
            }
        }
    }

    fn end_of(&self, task: &HelperTask<'_>) -> DriverResult<(End, String, String)> {
        let helper = self.describe(task)?;
        let text = serde_json::to_vec(&helper).map_err(|e| broken("describe a helper", &e))?;
        let mut launcher = Command::new(&self.agent)
            .arg("confine")
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed("run", &self.agent))?;
        if let Some(mut stdin) = launcher.stdin.take() {
            // A program that cannot be written to fails, and reports why.
            let _ = stdin.write_all(&text);
        }
        // The launcher ends with the thread that started it: this one, which waits for it.
        let (printed, said) = std::thread::scope(|scope| {
            let printed = launcher.stdout.take().map(|pipe| scope.spawn(|| head_of(pipe)));
            let said = launcher.stderr.take().map(tail_of).unwrap_or_default();
            let printed = printed.and_then(|reading| reading.join().ok()).unwrap_or_default();
            (printed, said)
        });
        let status = launcher.wait().map_err(failed("wait for", &self.agent))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        let (before, line) = said.trim_end().rsplit_once('\n').unwrap_or(("", said.trim_end()));
        let end = line.strip_prefix(MARK).and_then(|line| serde_json::from_str(line).ok());
        let end = end.ok_or_else(|| {
            broken("run a helper", &format!("its launcher ended with {status}: {line}"))
        })?;
        Ok((end, String::from_utf8_lossy(&printed).into_owned(), before.to_owned()))
    }

    fn describe(&self, task: &HelperTask<'_>) -> DriverResult<Helper> {
        let program = match task.program {
            INPUT => PathBuf::from(INPUT),
            name if Path::new(name).is_absolute() => PathBuf::from(name),
            name => find(name).ok_or_else(|| missing(name))?,
        };
        let path = PLACES.join(":");
        let own = [("PATH", path.as_str()), ("LANG", "C.UTF-8")];
        let env = own.iter().chain(task.env);
        let argv = std::iter::once(&task.program).chain(task.args);
        Ok(Helper {
            version: VERSION,
            program,
            argv: argv.map(|word| (*word).to_owned()).collect(),
            env: env
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect::<BTreeMap<_, _>>(),
            input: task.input.clone(),
            output: task.output.map(Path::to_owned),
            uid: self.uid()?,
            limits: task.limits,
        })
    }

    /// The uid of this daemon's helpers, which no other daemon on this host uses.
    fn uid(&self) -> DriverResult<u32> {
        let mut uid = self.uid.lock();
        if let Some(uid) = *uid {
            return Ok(uid);
        }
        for number in 0..DAEMONS {
            let first = FIRST_UID + number * CLAIMED;
            let claimed = self.claims.claim(&(first..first + CLAIMED));
            if claimed.map_err(|error| broken("claim uids for helpers", &error))? {
                *uid = Some(first);
                return Ok(first);
            }
        }
        Err(broken("claim uids for helpers", &"all are taken"))
    }
}

fn step_of(task: &HelperTask<'_>) -> String {
    let name = Path::new(task.program).file_name().unwrap_or_default();
    format!("run `{}`", name.to_string_lossy())
}

fn missing(name: &str) -> DriverError {
    let package = match name {
        "mkfs.erofs" => "; install erofs-utils",
        "mkfs.ext4" => "; install e2fsprogs",
        _ => "",
    };
    DriverError::Unsupported {
        driver: crate::driver::microvm::NAME,
        reason: format!("`{name}` is missing{package}"),
    }
}

/// A program of the host's, where helpers are looked for.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    PLACES.iter().map(|place| Path::new(place).join(name)).find(|path| path.is_file())
}

/// Reads everything and keeps the beginning.
fn head_of(pipe: impl Read) -> Vec<u8> {
    let mut head = Vec::new();
    let mut pipe = pipe.take(KEPT as u64);
    let _ = pipe.read_to_end(&mut head);
    let _ = io::copy(pipe.get_mut(), &mut io::sink());
    head
}

/// Reads everything and keeps the end.
fn tail_of(mut pipe: impl Read) -> Vec<u8> {
    let mut tail = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match pipe.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return tail,
            Ok(read) => {
                tail.extend_from_slice(piece.get(..read).unwrap_or_default());
                if tail.len() > 2 * KEPT {
                    tail.drain(..tail.len() - KEPT);
                }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::path::Path;

    use super::{
        DEFAULT_LIMITS, HelperLimits, HelperTask, Helpers, INPUT, Input, head_of, tail_of,
    };
    use crate::embedded::AGENT;

    /// Helpers for a test, with the agent in `dir`.
    pub(crate) fn helpers(dir: &Path) -> Option<Helpers> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: confining takes root");
            return None;
        }
        let agent = dir.join("keep-agent");
        fs::write(&agent, AGENT.bytes()).expect("a directory of our own");
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).expect("our own file");
        Some(Helpers::new(agent, dir))
    }

    fn task<'a>(args: &'a [&'a str], input: Input) -> HelperTask<'a> {
        HelperTask { program: "sh", args, env: &[], input, output: None, limits: DEFAULT_LIMITS }
    }

    fn field<'a>(status: &'a str, name: &str) -> &'a str {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or("", |(_, value)| value.trim())
    }

    #[test]
    fn a_helper_has_nothing_but_its_input_and_its_output() {
        let dir = tempfile::TempDir::with_prefix("keep-confined-").expect("a directory");
        let Some(helpers) = helpers(dir.path()) else { return };
        let layer = dir.path().join("lay-1/diff");
        fs::create_dir_all(&layer).expect("a layer");
        for (name, owner) in [("root's", 0), ("user's", 1000), ("podman's", 100_000)] {
            fs::write(layer.join(name), name).expect("a file");
            fs::set_permissions(layer.join(name), fs::Permissions::from_mode(0o600)).expect("ours");
            std::os::unix::fs::chown(layer.join(name), Some(owner), Some(owner)).expect("ours");
        }
        let layers =
            Input::Layers { directory: dir.path().into(), lower: vec!["lay-1/diff".into()] };
        let output = dir.path().join("output");
        fs::write(&output, "").expect("a file");
        let script = "cat /in/*; stat -c ' %u' /in/*; ls /; env; id -u; ls /dev; \
            cat /etc/passwd; echo x > /in/new; echo x > /usr/new; echo done > /out; \
            cat < /dev/tcp/127.0.0.1/22; kill -9 1; exit 0";
        let words = ["-c", script];
        let task = HelperTask { program: "bash", output: Some(&output), ..task(&words, layers) };
        let printed = helpers.run(&task).expect("it runs");
        assert!(printed.starts_with("podman'sroot'suser's 100000\n 0\n 1000\n"), "{printed}");
        let expected = "/in\n";
        assert!(!printed.contains(expected) && !printed.contains("root:"), "{printed}");
        assert!(printed.contains("\nPATH=/usr/bin:/usr/sbin:/bin:/sbin\n"), "{printed}");
        assert!(!printed.contains("HOME=") && !printed.contains("CARGO"), "{printed}");
        assert_eq!(fs::read_to_string(&output).expect("it is there"), "done\n");
        assert_eq!(fs::metadata(&output).expect("it is there").uid(), 0, "it is still ours");
        assert!(!layer.join("new").exists() && !Path::new("/usr/new").exists());
    }

    #[test]
    fn a_helper_is_a_stranger_on_the_host() {
        let dir = tempfile::TempDir::with_prefix("keep-confined-").expect("a directory");
        let Some(helpers) = helpers(dir.path()) else { return };
        // Seen from outside: inside there is no /proc.
        let watch = std::thread::spawn(move || {
            let start = std::time::Instant::now();
            loop {
                assert!(start.elapsed().as_secs() < 60, "it was not seen");
                for entry in fs::read_dir("/proc").expect("it is there").flatten() {
                    let read = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
                    let Some(words) = read("cmdline").filter(|words| words.contains("keep-seen-1"))
                    else {
                        continue;
                    };
                    let seen = read("status").zip(read("environ"));
                    let net = fs::read_link(entry.path().join("ns/net"));
                    if let (true, Some((status, environ)), Ok(net)) =
                        (words.starts_with("sleep"), seen, net)
                    {
                        return (status, environ, net);
                    }
                }
            }
        });
        let script = "exec -a sleep-keep-seen-1 sleep 2";
        let words = ["-c", script];
        let nothing = HelperTask { program: "bash", ..task(&words, Input::Nothing) };
        helpers.run(&nothing).expect("it runs");
        let (status, environ, net) = watch.join().expect("it was seen");
        let uids: Vec<u32> =
            field(&status, "Uid").split_whitespace().flat_map(str::parse).collect();
        assert!(uids.iter().all(|uid| *uid >= 0xF000_0000), "{uids:?}");
        for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(&status, name), "0000000000000000", "{name}");
        }
        assert_eq!(field(&status, "NoNewPrivs"), "1");
        assert_eq!(field(&status, "Seccomp"), "2");
        assert_eq!(field(&status, "Cgroups"), "");
        assert_ne!(net, fs::read_link("/proc/self/ns/net").expect("ours"));
        let names: Vec<&str> =
            environ.split('\0').filter_map(|pair| Some(pair.split_once('=')?.0)).collect();
        assert!(
            names.iter().all(|name| ["PATH", "LANG", "PWD", "SHLVL", "_", "OLDPWD"].contains(name)),
            "{names:?}"
        );
    }

    #[test]
    fn a_helper_meets_its_limits() {
        let dir = tempfile::TempDir::with_prefix("keep-confined-").expect("a directory");
        let Some(helpers) = helpers(dir.path()) else { return };
        let fails = |args: &[&str], limits: HelperLimits| {
            let output = dir.path().join("output");
            fs::write(&output, "").expect("a file");
            let task = HelperTask { limits, output: Some(&output), ..task(args, Input::Nothing) };
            let error = helpers.run(&task).expect_err("it fails").to_string();
            (error, fs::metadata(&output).expect("it is there").len())
        };
        let (error, _) =
            fails(&["-c", "sleep 100"], HelperLimits { deadline: 1, ..DEFAULT_LIMITS });
        assert!(error.contains("longer than 1 s"), "{error}");
        let (error, _) =
            fails(&["-c", "while :; do :; done"], HelperLimits { cpu: 1, ..DEFAULT_LIMITS });
        assert!(error.contains("signal 9") || error.contains("signal 24"), "{error}");
        let fill = "head -c 100000 /dev/zero > /out";
        let (error, length) =
            fails(&["-c", fill], HelperLimits { file_size: 4096, ..DEFAULT_LIMITS });
        assert!(error.contains("too large") && length == 4096, "{error}");
        let (error, _) = fails(&["-c", "echo first >&2; echo last >&2; exit 3"], DEFAULT_LIMITS);
        assert!(error.contains("status 3: last"), "{error}");
        let (error, _) = fails(
            &["-c", "kill -9 $$; exec sleep 9"],
            HelperLimits { deadline: 1, ..DEFAULT_LIMITS },
        );
        assert!(error.contains("longer than"), "it is the first process of its own: {error}");
        let absent = HelperTask { program: "no-such-program", ..task(&[], Input::Nothing) };
        assert!(helpers.run(&absent).is_err());
        let file = HelperTask {
            program: INPUT,
            ..task(&["tsc"], Input::File(dir.path().join("keep-agent")))
        };
        helpers.run(&file).expect("a program that is shown can be run");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let long: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
        assert_eq!(head_of(long.as_slice()), long[..64 << 10]);
        let tail = tail_of(long.as_slice());
        assert!(tail.len() <= 2 * (64 << 10) && long.ends_with(&tail) && tail.len() >= 64 << 10);
        assert_eq!(tail_of(&b"short"[..]), b"short");
    }
}
