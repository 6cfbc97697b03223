//! Connections that wait until somebody has approved the first contact with their host.
//!
//! A name stands for a host where the name server gave out the connection's address for it, or it
//! cannot be distinguished from a name that a program made up: then the address is the host, too. A
//! connection of plain HTTP is opened while contacts are held, because its next request may be for
//! another host; one that hides its host has the address for one.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{Dispatcher, GuestStream, Heard, NameSource, Named, Ruling, Sniffed, fits_unnamed};
use crate::model::Protocol;
use crate::net::gate::Contact;
use crate::net::sniff;
use crate::net::special_addresses::Destination;

/// How many connections and requests of a session are held at most.
pub(in crate::net) const MOST_HELD: usize = 128;
/// How long a program may take to read why it was refused.
const READ_WITHIN: Duration = Duration::from_secs(2);

const TOO_MANY: &str = "too many connections of this sandbox wait for an approval";

/// Why a connection may not continue.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) name: Option<String>,
    pub(super) why: String,
}

impl Dispatcher {
    /// How many connections and requests are held.
    pub(in crate::net) fn held(&self) -> usize {
        MOST_HELD.saturating_sub(self.held.available_permits())
    }

    /// Where a connection to a stand-in goes, once it may.
    pub(super) async fn approach<G: GuestStream>(
        &self,
        guest: &mut G,
        first: &mut Vec<u8>,
        port: u16,
        name: &str,
    ) -> Result<Destination, Held> {
        let refused = |why: String| Held { name: Some(name.to_owned()), why };
        self.rules.now().lookup(name).map_err(refused)?;
        self.hold(guest, first, name, port).await.map_err(refused)?;
        let Some(place) = self.names.place(name, port).await else {
            return Err(refused("the name has no address".to_owned()));
        };
        if let Some(why) = self.upstream.refused(place) {
            return Err(refused(format!("always refused: {why}")));
        }
        match self.rules.now().address(place) {
            Ruling::Deny(rule) => Err(refused(rule)),
            Ruling::Allow(_) | Ruling::ByName => Ok(place),
        }
    }

    /// Holds a connection whose host is not approved yet. What the rules refuse is left to them.
    pub(super) async fn meet_host<G: GuestStream>(
        &self,
        guest: &mut G,
        first: &mut Vec<u8>,
        to: Destination,
        names: &[String],
        heard: &Heard,
    ) -> Result<(), Held> {
        if !self.gate.holds_hosts() {
            return Ok(());
        }
        let (ip, port) = (to.asked.ip(), to.asked.port());
        let told = match heard {
            Heard::Bytes(Sniffed::Tls(Some(name))) => Some((name, NameSource::Tls)),
            Heard::Bytes(Sniffed::Http(Some(name))) => Some((name, NameSource::Http)),
            _ => None,
        };
        let rules = self.rules.now();
        let Some((name, source)) = told else {
            let kind = super::kind_of(heard);
            if fits_unnamed(&rules, to, names, kind).is_err() {
                return Ok(());
            }
            // Its requests may be for any host that is served there.
            let names: &[String] = if hides_hosts(heard, first) { &[] } else { names };
            if self.is_known(ip, names) {
                return Ok(());
            }
            let host = names.first().cloned().unwrap_or_else(|| ip.to_string());
            let held = self.hold(guest, first, &host, port).await;
            return held.map_err(|why| Held { name: names.first().cloned(), why });
        };
        if let Named::Deny(_) = rules.named(to, name, source) {
            return Ok(());
        }
        let refused = |why: String| Held { name: Some(name.clone()), why };
        // A name that is not approved is not looked up either.
        self.hold(guest, first, name, port).await.map_err(refused)?;
        if !self.names.gave(ip, name).await {
            self.hold(guest, first, &ip.to_string(), port).await.map_err(refused)?;
        }
        Ok(())
    }

    /// Whether one of the names that an address was given out for may be contacted, or the address.
    fn is_known(&self, ip: IpAddr, names: &[String]) -> bool {
        let is_good = |host: &str| self.gate.known(host) == Some(Ok(()));
        names.iter().any(|name| is_good(name)) || is_good(&ip.to_string())
    }

    /// Waits for an answer about a host. What the program says meanwhile is kept, as far as first bytes are.
    async fn hold<G: GuestStream>(
        &self,
        guest: &mut G,
        first: &mut Vec<u8>,
        host: &str,
        port: u16,
    ) -> Result<(), String> {
        if !self.gate.holds_hosts() {
            return Ok(());
        }
        if let Some(known) = self.gate.known(host) {
            return known;
        }
        let Ok(_held) = self.held.try_acquire() else { return Err(TOO_MANY.to_owned()) };
        let contact = Contact { host: host.to_owned(), port };
        let mut answered = self.gate.contact(&contact);
        let mut piece = [0; 4096];
        loop {
            let room = piece.len().min(sniff::MOST.saturating_sub(first.len()));
            tokio::select! {
                biased;
                answered = &mut answered => return answered,
                read = guest.read(&mut piece[..room]), if room > 0 => match read {
                    Ok(0) | Err(_) => return Err("it ended before anybody answered".to_owned()),
                    Ok(count) => first.extend_from_slice(&piece[..count]),
                },
            }
        }
    }

    /// Ends a connection that may not continue. A program that speaks HTTP gets the reason.
    pub(super) async fn end_held<G: GuestStream>(
        &self,
        mut guest: G,
        first: &[u8],
        to: Destination,
        Held { name, why }: Held,
    ) {
        self.refuse(Protocol::Tcp, to, name, why.clone());
        if !matches!(sniff::look(first), Sniffed::Http(_)) {
            return guest.reset();
        }
        let text = format!("Sandkeep refused this connection: {why}.\n");
        let answer = format!(
            "HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
            text.len()
        );
        let told = async {
            guest.write_all(answer.as_bytes()).await?;
            guest.shutdown().await?;
            // Until the program has read it: what is unread when a connection goes may be lost.
            let mut rest = [0; 4096];
            while guest.read(&mut rest).await? > 0 {}
            Ok::<_, std::io::Error>(())
        };
        let _ = timeout(READ_WITHIN, told).await;
    }

    /// Refuses datagrams to a host that is not approved yet, and asks for an approval: they cannot
    /// be held. Returns whether it did.
    pub(super) fn refuses_datagrams(&self, protocol: Protocol, to: SocketAddr) -> bool {
        let waits = "it waits for an approval; datagrams are not held";
        if let Some(name) = self.names.stand_in(to.ip()) {
            let place = Destination::new(to);
            if let Err(rule) = self.rules.now().lookup(&name) {
                self.refuse(protocol, place, Some(name), rule);
                return true;
            }
            let why = match self.gate.known(&name) {
                Some(Ok(())) => "its name has another address now: look it up again".to_owned(),
                Some(Err(why)) => why,
                None => {
                    self.gate.ask(Contact { host: name.clone(), port: to.port() });
                    waits.to_owned()
                }
            };
            self.refuse(protocol, place, Some(name), why);
            return true;
        }
        if !self.gate.holds_hosts() {
            return false;
        }
        let place = Destination::new(to);
        let names = self.names.of(to.ip());
        let by_rules = self.rules.now().datagrams(protocol, place, &names);
        // What the rules refuse is left to them.
        let by_rules = by_rules.is_err() || self.upstream.refused(place).is_some();
        if by_rules || self.is_known(to.ip(), &names) {
            return false;
        }
        let host = names.first().cloned().unwrap_or_else(|| to.ip().to_string());
        let why = match self.gate.known(&host) {
            Some(Err(why)) => why,
            _ => {
                self.gate.ask(Contact { host, port: to.port() });
                waits.to_owned()
            }
        };
        self.refuse(protocol, place, names.first().cloned(), why);
        true
    }
}

/// Whether a connection may carry HTTP in the clear and does not name its host.
fn hides_hosts(heard: &Heard, first: &[u8]) -> bool {
    match heard {
        Heard::Bytes(Sniffed::Http(None) | Sniffed::Http2) => true,
        Heard::Stalled => !matches!(first.first(), Some(20..=23)),
        _ => false,
    }
}
