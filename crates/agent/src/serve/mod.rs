//! What the agent does once the sandbox is built: it answers requests on the link, as PID 1.
//!
//! | folder | decides |
//! |---|---|
//! | [`link`] | which request a frame belongs to |
//! | [`command`] | how a process is started, when its output is sent, when it is over |
//! | [`files`] | what file operations do, as which user |
//!
//! Everything but file operations runs on one thread, in one runtime. File operations block and run as the user they are for, so
//! each gets a thread that ends with it ([`files::worker`]).
//!
//! *No input ends the agent.* It is the first process of the sandbox: if it ends, the sandbox does. Bytes that are not frames close
//! the connection they came on. What the host can make the agent hold is bounded: streams, commands, and a window of bytes for each.

mod command;
mod error;
mod files;
mod link;
mod machine_requests;
mod port;
mod questions;
mod view_refresh;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use sandkeep_proto::frame::CHUNK;
use tokio::sync::{Notify, Semaphore};
use tokio::task::LocalSet;

use crate::cage::{Endpoints, View, hand_over};
use crate::machine::Machine;
use command::{Command, launch, reap, user};
pub(crate) use error::RequestError;
pub(crate) use files::worker::FileTask;
use link::connection;
use link::outbound::Outbound;
use link::transport::{Port, Transport};

/// The numbers of a user and its group, if the sandbox knows who that is.
pub(crate) fn ids_of(user: &str) -> Option<(u32, u32)> {
    user::lookup(Some(user)).ok().map(|identity| (identity.uid, identity.gid))
}

/// How many commands are known at one time, exited ones that were not forgotten included.
const COMMANDS: usize = 4096;
/// How many short pieces of file work are done at one time.
const SHORT_WORK: usize = 8;
/// How many transfers of files are under way at one time. They wait for the host, so they have
/// room of their own and never hold up the short ones.
const LONG_WORK: usize = 64;

/// What the one thread knows.
#[derive(Debug)]
struct Agent {
    /// What this run of the machine is called.
    generation: RefCell<String>,
    /// The machine, where it is one of its own.
    machine: Option<Arc<Machine>>,
    commands: RefCell<HashMap<String, Rc<Command>>>,
    /// Commands whose process was not reaped yet.
    running: RefCell<HashMap<i32, Rc<Command>>>,
    started: Cell<u64>,
    /// A command is being started.
    starting: Notify,
    /// What the sandbox sees of its limits; absent where the kernel itself shows them.
    view: Option<Rc<RefCell<View>>>,
    /// The connection that was greeted last.
    current: RefCell<Option<Rc<Outbound>>>,
    short_work: Semaphore,
    long_work: Semaphore,
    /// Where pipes are read into; used only between two waits, so one is enough.
    scratch: Rc<RefCell<Vec<u8>>>,
    /// The limit of open files that commands get.
    files: libc::rlimit,
    /// What programs inside ask.
    questions: Rc<questions::Questions>,
}

impl Agent {
    /// How often the kernel has killed a process out of memory. Only a kernel of our own counts
    /// ours alone: in a container the daemon asks the control group instead.
    fn oom_kills(&self) -> u64 {
        if self.machine.is_none() {
            return 0;
        }
        let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }
}

/// Serves until the machine ends.
pub(crate) fn run(endpoints: Endpoints) -> ! {
    again(|| serve(&endpoints))
}

/// Serves on the port of a machine of its own, until it ends.
pub(crate) fn run_machine(machine: &Arc<Machine>) -> ! {
    again(|| serve_machine(machine))
}

fn again(serve: impl Fn() -> std::io::Result<Infallible>) -> ! {
    loop {
        // Only the runtime's own setup can fail, for want of descriptors or memory: try again.
        let Err(error) = serve();
        eprintln!("keep-agent: could not serve: {error}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn agent(
    machine: Option<Arc<Machine>>,
    view: Option<Rc<RefCell<View>>>,
) -> std::io::Result<Rc<Agent>> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let files = launch::raise_file_limit();
    Ok(Rc::new(Agent {
        generation: RefCell::new(generation()?),
        machine,
        commands: RefCell::default(),
        running: RefCell::default(),
        started: Cell::new(0),
        starting: Notify::new(),
        view,
        current: RefCell::default(),
        short_work: Semaphore::new(SHORT_WORK),
        long_work: Semaphore::new(LONG_WORK),
        scratch: Rc::new(RefCell::new(vec![0; CHUNK])),
        files,
        questions: Rc::default(),
    }))
}

fn serve(endpoints: &Endpoints) -> std::io::Result<Infallible> {
    let agent = agent(None, endpoints.view.clone())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = copy(&endpoints.link)?;
    let network = match &endpoints.network {
        Some((listener, device)) => Some((copy(listener)?, device.try_clone()?)),
        None => None,
    };
    LocalSet::new().block_on(&runtime, async move {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let children = reap::Children::watch()?;
        tokio::task::spawn_local(children.reap(Rc::clone(&agent)));
        tokio::task::spawn_local(view_refresh::keep_current(Rc::clone(&agent)));
        if let Some((listener, device)) = network {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            tokio::task::spawn_local(hand_over_network(listener, device));
        }
        loop {
            match listener.accept().await {
                Ok((socket, _)) => {
                    let (agent, transport) = (Rc::clone(&agent), Transport::Socket(socket));
                    tokio::task::spawn_local(connection::serve(agent, transport, &[]));
                }
                // Most likely the process is out of descriptors: they become free again.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    })
}

fn serve_machine(machine: &Arc<Machine>) -> std::io::Result<Infallible> {
    let agent = agent(Some(Arc::clone(machine)), None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let device = machine.port()?;
    LocalSet::new().block_on(&runtime, async move {
        let children = reap::Children::watch()?;
        tokio::task::spawn_local(children.reap(Rc::clone(&agent)));
        let port = Port::new(device)?;
        tokio::task::spawn_local(Rc::clone(&port).watch());
        loop {
            let nonce = port.begin().await;
            let transport = Transport::Port(Rc::clone(&port));
            connection::serve(Rc::clone(&agent), transport, &nonce.mark()).await;
            port.give_up();
        }
    })
}

fn copy(listener: &UnixListener) -> std::io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    listener.try_clone()
}

/// Gives the network device to each daemon that comes for it.
async fn hand_over_network(listener: tokio::net::UnixListener, device: OwnedFd) {
    loop {
        match listener.accept().await {
            // One that has hung up again has no use for it.
            Ok((socket, _)) => {
                drop(socket.into_std().map(|socket| hand_over(device.as_fd(), &socket)));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A name for this run of the machine, which no other run has.
fn generation() -> std::io::Result<String> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    Ok(hex(&bytes))
}

/// Draws random bytes, a few: of the kernel itself, so that no device has to be there.
pub(crate) fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    let drawn = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::INSECURE)?;
    if drawn == bytes.len() { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}
