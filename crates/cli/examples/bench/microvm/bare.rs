//! Bare QEMU: the same kernel, initramfs, machine and devices as ours, with nothing around it.
//!
//! Its words are taken from a machine of ours that runs, but for files: disks are empty, memory is one shared file, and
//! there is no user, namespace, filter or control group of its own.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sandkeep_core::guest::Guest;
use serde_json::{Value, json};

use super::cost::Machines;
use super::{Outcome, Rounds, Table};

const PATIENCE: Duration = Duration::from_secs(120);

pub(super) async fn run(
    table: &mut Table,
    machines: &Machines,
    data: &Path,
    scratch: &Path,
    rounds: &Rounds,
) -> Outcome<()> {
    let ours = machines.pids().into_iter().next().ok_or("no machine of ours runs")?;
    let template = Template::of(ours, data, scratch)?;
    let mut boots = Vec::new();
    for _ in 0..rounds.boots {
        let began = Instant::now();
        let machine = template.spawn(&[])?;
        machine.hello().await?;
        boots.push(began.elapsed());
    }
    table.add("(bare QEMU) boot → the agent answers", &boots);

    let machine = template.spawn(&[])?;
    machine.hello().await?;
    let mut control = machine.control()?;
    let began = Instant::now();
    control.ask("stop", json!({}))?;
    control.leave_memory_out()?;
    let state = scratch.join("bare-devices");
    control.ask("migrate", json!({ "uri": format!("exec:cat > {}", state.display()) }))?;
    control.migrated()?;
    table.add("(bare QEMU) stop and save devices", &[began.elapsed()]);
    drop(machine);

    let (ram, kept) = (scratch.join("bare-ram"), scratch.join("bare-ram-kept"));
    fs::rename(&ram, &kept)?;
    let (mut runs, mut restores) = (Vec::new(), Vec::new());
    for _ in 0..rounds.restores {
        // A machine writes to its memory: each has a copy, which is made before the clock starts.
        let copied = Command::new("cp").arg("--sparse=always").arg(&kept).arg(&ram).status()?;
        if !copied.success() {
            return Err("the memory could not be copied".into());
        }
        let began = Instant::now();
        let machine = template.spawn(&["-incoming", "defer"])?;
        machine.restore(&state).map_err(|error| format!("{error}\n{}", machine.said()))?;
        runs.push(began.elapsed());
        machine.hello().await?;
        restores.push(began.elapsed());
    }
    table.add("(bare QEMU) restore (its processors run)", &runs);
    table.add("(bare QEMU) restore → the agent answers", &restores);
    fs::remove_file(ram)?;
    fs::remove_file(kept)?;
    Ok(())
}

/// The command line of a machine, with files of its own.
struct Template {
    program: PathBuf,
    argv: Vec<String>,
    scratch: PathBuf,
}

impl Template {
    fn of(pid: u32, data: &Path, scratch: &Path) -> Outcome<Self> {
        let line = fs::read(format!("/proc/{pid}/cmdline"))?;
        let words: Vec<String> = line
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        let value = |flag: &str| -> Outcome<String> {
            let place = words.iter().position(|word| word == flag);
            place
                .and_then(|at| words.get(at + 1).cloned())
                .ok_or_else(|| format!("no {flag}").into())
        };
        let kernel = data.join("microvm/kernel");
        let path = |path: PathBuf| path.display().to_string();
        let mut argv = ["-nodefaults", "-no-user-config", "-nographic", "-no-reboot"]
            .map(str::to_owned)
            .to_vec();
        for flag in ["-M", "-accel", "-cpu", "-smp", "-m"] {
            argv.extend([flag.to_owned(), value(flag)?]);
        }
        // A machine that boots gets the frequency of its clock; a restored one, as ours was, knows
        // it.
        let khz = sandkeep_testkit::microvm::kernel()?.tsc_khz;
        argv.extend(["-append".to_owned(), format!("{} tsc_early_khz={khz}", value("-append")?)]);
        let memory = value("-object")?
            .replace("mem-path=/ram,", &format!("mem-path={},", path(scratch.join("bare-ram"))));
        argv.extend(["-object".to_owned(), memory]);
        argv.extend(["-kernel".to_owned(), path(kernel.join("vmlinuz"))]);
        argv.extend(["-initrd".to_owned(), path(kernel.join("initramfs"))]);
        let socket = |name: &str| {
            let path = path(scratch.join(format!("bare-{name}.sock")));
            format!("socket,id={name},path={path},server=on,wait=off")
        };
        argv.extend(["-chardev".to_owned(), socket("link")]);
        argv.extend(["-chardev".to_owned(), socket("control")]);
        argv.extend(["-mon", "chardev=control,mode=control"].map(str::to_owned));
        argv.extend(["-netdev", "hubport,id=net,hubid=0"].map(str::to_owned));
        for device in words.iter().zip(words.iter().skip(1)) {
            let ("-device", device) = (device.0.as_str(), device.1) else { continue };
            let mut device = device.clone();
            if device.starts_with("virtio-blk-device") {
                let node = device.split(',').find_map(|part| part.strip_prefix("drive="));
                let node = node.ok_or("a disk without a drive")?.to_owned();
                let empty =
                    format!("node-name={node},driver=null-co,size={},read-zeroes=on", 1u64 << 30);
                argv.extend(["-blockdev".to_owned(), empty]);
            }
            if device.starts_with("virtserialport") {
                device = device.replace("chardev=agent", "chardev=link");
            }
            argv.extend(["-device".to_owned(), device]);
        }
        let program = fs::read_link(format!("/proc/{pid}/exe"))?;
        Ok(Self { program, argv, scratch: scratch.to_path_buf() })
    }

    fn spawn(&self, more: &[&str]) -> Outcome<Bare> {
        for name in ["link", "control"] {
            let _ = fs::remove_file(self.scratch.join(format!("bare-{name}.sock")));
        }
        let log = fs::File::create(self.scratch.join("bare.log"))?;
        let child = Command::new(&self.program)
            .args(&self.argv)
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Bare { child, scratch: self.scratch.clone() })
    }
}

/// A machine that ends with this.
struct Bare {
    child: Child,
    scratch: PathBuf,
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Bare {
    async fn hello(&self) -> Outcome<()> {
        let socket = self.scratch.join("bare-link.sock");
        match Guest::connect_serial(&socket, PATIENCE).await {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("bare QEMU: {error}\n{}", self.said()).into()),
        }
    }

    /// Loads devices and resumes.
    fn restore(&self, state: &Path) -> Outcome<()> {
        let mut control = self.control()?;
        control.leave_memory_out()?;
        let from = format!("exec:cat {}", state.display());
        control.ask("migrate-incoming", json!({ "uri": from }))?;
        control.migrated()?;
        control.ask("cont", json!({})).map(drop)
    }

    fn said(&self) -> String {
        fs::read_to_string(self.scratch.join("bare.log")).unwrap_or_default()
    }

    fn control(&self) -> Outcome<Control> {
        let path = self.scratch.join("bare-control.sock");
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(&path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut control = Control { lines: BufReader::new(stream) };
        control.read()?;
        control.ask("qmp_capabilities", json!({}))?;
        Ok(control)
    }
}

/// The hypervisor's control socket.
struct Control {
    lines: BufReader<UnixStream>,
}

impl Control {
    fn read(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Outcome<Value> {
        let ask = json!({ "execute": command, "arguments": arguments });
        self.lines.get_mut().write_all(format!("{ask}\n").as_bytes())?;
        loop {
            let answer = self.read()?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}").into());
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
        }
    }

    fn leave_memory_out(&mut self) -> Outcome<()> {
        let on = json!([{ "capability": "x-ignore-shared", "state": true }]);
        self.ask("migrate-set-capabilities", json!({ "capabilities": on })).map(drop)
    }

    /// Waits until devices are saved or loaded.
    fn migrated(&mut self) -> Outcome<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.ask("query-migrate", json!({}))?;
            match state["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => return Err(format!("bare QEMU: {state}").into()),
                _ if Instant::now() > deadline => return Err("bare QEMU takes too long".into()),
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}
