//! A running sandbox on the customized image of this host.
use std::path::{Path, PathBuf};
use std::process::Command;

use sandkeep_core::engine::{CommandOutput, Create, Engine, Exec};
use sandkeep_core::model::Patch;
use sandkeep_core::store::image::{AddedDirectory, Customization, Reporter};
use sandkeep_testkit::house::{House, name, project};

pub(crate) struct Machine {
    engine: Engine,
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Machine {
    /// One whose base has no `sudo`, whatever the host has.
    pub(crate) async fn without_sudo(house: &House) -> Self {
        let engine = house.open().await;
        let host = engine.images().host(false, &Reporter::silent()).await.unwrap();
        for sudo in ["usr/bin/sudo", "bin/sudo"] {
            // A name in this house's own layer; the host keeps its file.
            let path = format!("layers/{}/diff/{sudo}", host.layers[0]);
            let _ = std::fs::remove_file(house.data().join(path));
        }
        Self::start(engine, "host").await
    }

    /// One whose base has the `sudo` of the directories, or the host's own if there are none.
    pub(crate) async fn with_sudo(house: &House, added: Vec<AddedDirectory>) -> Self {
        let engine = house.open().await;
        let customization = Customization { add: added, ..Customization::default() };
        engine.images().customize("host", "with-sudo", &customization).await.unwrap();
        Self::start(engine, "with-sudo").await
    }

    async fn start(engine: Engine, base: &str) -> Self {
        engine.images().customized(base, "machine", &Customization::default()).await.unwrap();
        let patch = Patch { image: Some("machine".to_owned()), ..Patch::default() };
        let create = Create { name: Some(name("box")), patch, start: true, ..Create::default() };
        engine.create(&project(), create, None).await.unwrap();
        Self { engine }
    }

    /// Runs a line in bash as the default user.
    pub(crate) async fn sh(&self, line: &str) -> Ran {
        self.run(line, None).await
    }

    /// Runs a line that must succeed.
    pub(crate) async fn ok(&self, line: &str) -> String {
        let ran = self.sh(line).await;
        assert_eq!(ran.code, 0, "{line}: {ran:?}");
        ran.out
    }

    /// Runs a line as root, without any `sudo`.
    pub(crate) async fn root(&self, line: &str) -> String {
        let ran = self.run(line, Some("root")).await;
        assert_eq!(ran.code, 0, "{line}: {ran:?}");
        ran.out
    }

    async fn run(&self, line: &str, user: Option<&str>) -> Ran {
        let argv = ["bash", "-c", line].map(str::to_owned).to_vec();
        let exec = Exec { argv, user: user.map(str::to_owned), ..Exec::default() };
        let mut started = self.engine.exec(&project(), &name("box"), exec).await.unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        while let Some(event) = started.events.next().await {
            match event {
                CommandOutput::Stdout(bytes) => out.extend_from_slice(&bytes),
                CommandOutput::Stderr(bytes) => err.extend_from_slice(&bytes),
                CommandOutput::Gap(bytes) => panic!("{bytes} bytes of output are missing"),
                CommandOutput::Exited(command) => {
                    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                    let code = command.exit_code.unwrap();
                    return Ran { code, out: text(&out), err: text(&err) };
                }
            }
        }
        panic!("a command whose end was not told");
    }
}

/// Directories that bring the distribution's `sudo`; none are needed where the host has it.
pub(crate) fn real_sudo(scratch: &Path) -> Result<Vec<AddedDirectory>, String> {
    if Path::new("/usr/bin/sudo").exists() {
        return Ok(Vec::new());
    }
    let run = |program: &str, args: &[&str], dir: &Path| {
        let ran = Command::new(program).args(args).current_dir(dir).output();
        match ran {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            Err(error) => Err(error.to_string()),
        }
    };
    let dir = scratch.join("sudo");
    std::fs::create_dir(&dir).map_err(|error| error.to_string())?;
    run("apt-get", &["download", "-q", "sudo"], &dir)
        .map_err(|why| format!("no sudo here, and none to be had: {}", why.trim()))?;
    let package: PathBuf = std::fs::read_dir(&dir)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .map_err(|error| error.to_string())?
        .first()
        .map(std::fs::DirEntry::path)
        .ok_or("apt-get brought nothing")?;
    let root = dir.join("root");
    run("dpkg-deb", &["-x", &package.to_string_lossy(), &root.to_string_lossy()], &dir)?;
    Ok(["usr", "etc"]
        .map(|part| AddedDirectory { from: root.join(part), to: Path::new("/").join(part) })
        .to_vec())
}
