//! Commands about ports: publishing them, opening them in a browser, forwarding them here.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sandkeep_client::types::{Access, IssuePortToken, PortStatus, PublishPort};
use sandkeep_client::{Client, Error};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use super::{Context, browser, or_dash, word};
use crate::args::{AccessArg, ForwardArgs, OpenArgs, PortsArgs};
use crate::failure::Failure;
use crate::screen::{Table, note};

pub(super) async fn ports(context: &Context, args: &PortsArgs) -> Result<(), Failure> {
    if let (Some(port), Some(access)) = (args.port, args.access) {
        let access = match access {
            AccessArg::Public => Access::Public,
            AccessArg::Private => Access::Private,
            AccessArg::Off => Access::Off,
        };
        let request = PublishPort { access, wake: !args.no_wake };
        let status = context.client.publish(&args.name, port, &request).await?;
        return context.screen.answer(&status, |status| match status.access {
            Access::Off => format!("{port}  off\n"),
            _ => format!("{port}  {}  {}\n", word(status.access), status.url),
        });
    }
    let all = context.client.ports(&args.name).await?;
    context.screen.answer(&all, |all| context.screen.table(&table(all)))
}

fn table(ports: &[PortStatus]) -> Table {
    let mut table = Table::new(&[">PORT", "ACCESS", "WAKES", "SERVICE", "URL"]);
    for port in ports {
        table.row(vec![
            port.port.to_string(),
            word(port.access),
            if port.wake { "yes" } else { "no" }.to_owned(),
            or_dash(port.service.clone()),
            port.url.clone(),
        ]);
    }
    table
}

/// Opens the address of a port in a browser, published for it if need be: private unless told otherwise.
pub(super) async fn open(context: &Context, args: &OpenArgs) -> Result<(), Failure> {
    let OpenArgs { name, port, public, print, expires } = args;
    let there = context.client.ports(name).await?;
    let there = there.into_iter().find(|there| there.port == *port);
    let wanted = match (&there, public) {
        (Some(there), false) => there.access,
        (_, true) => Access::Public,
        (None, false) => Access::Private,
    };
    let status = match there {
        Some(there) if there.access == wanted => there,
        other => {
            let wake = other.is_none_or(|other| other.wake);
            let request = PublishPort { access: wanted, wake };
            let status = context.client.publish(name, *port, &request).await?;
            if !context.screen.json {
                note(&published_note(name, &status));
            }
            status
        }
    };
    let url = if status.access == Access::Private {
        let request = IssuePortToken { expires: *expires };
        let token = context.client.port_token(name, *port, &request).await?;
        context.screen.answer(&token, |token| format!("{}\n", token.url))?;
        token.url
    } else {
        context.screen.answer(&status, |status| format!("{}\n", status.url))?;
        status.url
    };
    match *print || context.screen.json {
        true => Ok(()),
        false => browser::open(&url).await,
    }
}

fn published_note(name: &str, status: &PortStatus) -> String {
    let who = match status.access {
        Access::Public => "everybody who knows the URL can reach it",
        _ => "a key of the project or this link is needed to reach it",
    };
    let (port, access) = (status.port, word(status.access));
    format!(
        "port {port} of {name} is now published ({access}): {who}; `keep ports {name} {port} off` takes it back"
    )
}

/// Listens here and carries every connection to a port inside, until it is interrupted.
pub(super) async fn forward(context: &Context, args: &ForwardArgs) -> Result<(), Failure> {
    let on = |kind: SignalKind| {
        signal(kind).map_err(|error| Failure::caused("cannot listen for signals", error))
    };
    let (mut interrupt, mut terminate) =
        (on(SignalKind::interrupt())?, on(SignalKind::terminate())?);
    // Checked before anything listens: a wrong name is reported here, not to the clients that
    // connect.
    context.client.sandbox(&args.name).await?;
    let wanted = SocketAddr::new(args.address, args.local.unwrap_or(args.port));
    let hint = "choose another with --local, or --local 0 for any that is free";
    let cannot =
        |error| Failure::caused(format!("cannot listen on {wanted}"), error).with_hint(hint);
    let listener = TcpListener::bind(wanted).await.map_err(cannot)?;
    let at = listener.local_addr().map_err(cannot)?;
    let told = serde_json::json!({ "listening": at.to_string(), "port": args.port });
    context.screen.answer(&told, |_| {
        format!("{at} is port {} of {}; Ctrl-C ends it\n", args.port, args.name)
    })?;
    let forwarder = Arc::new(Forwarder {
        client: context.client.clone(),
        name: args.name.clone(),
        port: args.port,
        complaints: AtomicU64::new(0),
    });
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    open.spawn(Arc::clone(&forwarder).carry(stream));
                }
                Err(error) => {
                    note(&format!("could not accept a connection: {error}"));
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            Some(_) = open.join_next(), if !open.is_empty() => {}
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        }
    }
    open.shutdown().await;
    Ok(())
}

struct Forwarder {
    client: Client,
    name: String,
    port: u16,
    complaints: AtomicU64,
}

impl Forwarder {
    async fn carry(self: Arc<Self>, mut here: TcpStream) {
        let _ = here.set_nodelay(true);
        match self.client.connect_port(&self.name, self.port).await {
            Ok(mut there) => {
                // Either side may close its own direction, or the whole connection.
                let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
            }
            Err(error) => {
                self.complain(&error);
                let _ = here.shutdown().await;
            }
        }
    }

    /// Prints the first failures; a client that tries again all the time would drown everything
    /// else.
    fn complain(&self, error: &Error) {
        let before = self.complaints.fetch_add(1, Ordering::Relaxed);
        if before < 10 {
            note(&format!("a connection to port {} failed: {error}", self.port));
        }
    }
}
