//! The settings in a request for a sandbox, as a patch of ours.
//!
//! Create, fork and update share their fields, so they are read in one place. What the engine has no
//! field for is kept in the sandbox's notes, under `vercel.`, and returned from there.

use std::collections::BTreeMap;

use sandkeep_core::model::{Patch, Port, Size, Span};

use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::input::Fields;
use crate::compat::vercel::sandboxes::source::{self, Fetched};
use crate::compat::vercel::{VercelSettings, drives, network};

pub(crate) const DAY: u64 = 24 * 3600 * 1000;
/// How long a session lasts by default.
const TIMEOUT: Span = Span(300_000);
/// How long snapshots are kept after their last use by default.
const SNAPSHOTS: u64 = 30 * DAY;
/// The port their CLI believes terminals to be on.
pub(crate) const INTERACTIVE_PORT: u16 = 26661;

pub(crate) const REGION: &str = "vercel.region";
pub(crate) const FAILOVER: &str = "vercel.failoverRegions";
pub(crate) const RUNTIME: &str = "vercel.runtime";
pub(crate) const IMAGE: &str = "vercel.image";
pub(crate) const EXPIRATION: &str = "vercel.snapshotExpiration";
pub(crate) const KEPT_EXPIRATION: &str = "vercel.keepLastSnapshots.expiration";

/// What a request asks for.
#[derive(Debug, Default)]
pub(crate) struct RequestedSettings {
    pub(crate) patch: Patch,
}

impl RequestedSettings {
    /// Reads what create, fork and update have in common.
    pub(crate) fn read(
        fields: &mut Fields,
        settings: &VercelSettings,
    ) -> Result<Self, VercelError> {
        let mut wishes = Self::default();
        wishes.patch.persistent = fields.flag("persistent")?;
        if let Some(timeout) = fields.span("timeout", 1000..=settings.max_timeout.0)? {
            wishes.patch.session_timeout = Some(Some(timeout));
        }
        wishes.resources(fields)?;
        wishes.ports(fields)?;
        wishes.tags(fields)?;
        wishes.patch.env = fields.words("env")?;
        if let Some(policy) = fields.written("networkPolicy") {
            let (policy, as_written) = network::read(&policy)?;
            wishes.patch.network = Some(Some(policy));
            wishes.note(network::AS_WRITTEN, as_written);
        }
        if fields.any("networkId").is_some_and(|id| !id.is_null()) {
            return Err(VercelError::refused("`networkId`: there are no private networks here."));
        }
        let region = fields.text("region")?.map(|region| short("region", region)).transpose()?;
        if let Some(regions) = fields.texts("failoverRegions")? {
            let regions: Vec<String> = regions
                .into_iter()
                .map(|region| short("failoverRegions", region))
                .collect::<Result<_, _>>()?;
            let note = (!regions.is_empty()).then(|| regions.join(","));
            wishes.note(FAILOVER, note);
        }
        if let Some(region) = region {
            wishes.note(REGION, Some(region));
        }
        wishes.snapshots(fields)?;
        if let Some(mounts) = fields.any("mounts") {
            wishes.patch.mounts = Some(drives::mounts_in(&mounts)?);
        }
        Ok(wishes)
    }

    /// Refuses a region that is also one to fail over to, given what is noted of the sandbox already.
    pub(crate) fn check_regions(
        &self,
        noted: &BTreeMap<String, String>,
        otherwise: &str,
    ) -> Result<(), VercelError> {
        if !self.patch.notes.contains_key(REGION) && !self.patch.notes.contains_key(FAILOVER) {
            return Ok(());
        }
        let after = |name: &str| match self.patch.notes.get(name) {
            Some(changed) => changed.as_deref(),
            None => noted.get(name).map(String::as_str),
        };
        let region = after(REGION).unwrap_or(otherwise);
        let failover = after(FAILOVER).unwrap_or_default();
        if failover.split(',').any(|other| other == region) {
            return Err(VercelError::bad(format!(
                "`failoverRegions` should NOT contain the `region` `{region}`."
            )));
        }
        Ok(())
    }

    /// Notes something to be returned, or removes the note.
    pub(crate) fn note(&mut self, name: &str, note: Option<String>) {
        self.patch.notes.insert(name.to_owned(), note);
    }

    fn resources(&mut self, fields: &mut Fields) -> Result<(), VercelError> {
        let Some(mut resources) = fields.object("resources")? else { return Ok(()) };
        let vcpus = resources.number("vcpus", 1..=64)?;
        let memory = resources.number("memory", 128..=1 << 22)?;
        resources.end()?;
        if let Some(vcpus) = vcpus {
            if vcpus != 1 && vcpus % 2 == 1 {
                return Err(VercelError::bad("`resources.vcpus` should be 1 or even."));
            }
            self.patch.millicpus = u32::try_from(vcpus * 1000).ok();
        }
        let megabytes = memory.or(vcpus.map(|vcpus| vcpus * 2048));
        self.patch.memory = megabytes.map(|megabytes| Size(megabytes << 20));
        Ok(())
    }

    fn ports(&mut self, fields: &mut Fields) -> Result<(), VercelError> {
        let Some(list) = fields.list("ports")? else { return Ok(()) };
        if list.len() > 15 {
            return Err(VercelError::bad("`ports` should NOT have more than 15 items."));
        }
        let mut ports = Vec::new();
        for value in list {
            let port = value.as_u64().and_then(|port| u16::try_from(port).ok());
            let Some(port) = port.filter(|port| *port >= 1024) else {
                return Err(VercelError::bad("`ports` should be integers between 1024 and 65535."));
            };
            if port == INTERACTIVE_PORT {
                let message = format!("Port {port} is reserved.");
                return Err(VercelError::new(
                    axum::http::StatusCode::BAD_REQUEST,
                    "reserved_port",
                    message,
                ));
            }
            let port = Port::from(port);
            if ports.contains(&port) {
                return Err(VercelError::bad("`ports` should NOT have duplicate items."));
            }
            ports.push(port);
        }
        self.patch.ports = Some(ports);
        Ok(())
    }

    fn tags(&mut self, fields: &mut Fields) -> Result<(), VercelError> {
        let Some(tags) = fields.words("tags")? else { return Ok(()) };
        if tags.len() > 5 {
            return Err(VercelError::bad("`tags` should NOT have more than 5 properties."));
        }
        self.patch.tags = Some(tags);
        Ok(())
    }

    fn snapshots(&mut self, fields: &mut Fields) -> Result<(), VercelError> {
        if let Some(expiration) = expiration(fields, "snapshotExpiration")? {
            self.patch.snapshot_expires = Some(span_of(expiration));
            self.note(EXPIRATION, Some(expiration.to_string()));
        }
        let Some(kept) = fields.any("keepLastSnapshots") else { return Ok(()) };
        if kept.is_null() {
            self.patch.keep_last = Some(None);
            self.patch.kept_expires = Some(None);
            self.note(KEPT_EXPIRATION, None);
            return Ok(());
        }
        let mut kept = Fields::of("keepLastSnapshots", kept)?;
        let count = kept.number("count", 1..=10)?.ok_or_else(|| {
            VercelError::bad("missing required property `keepLastSnapshots.count`.")
        })?;
        self.patch.keep_last = Some(u32::try_from(count).ok());
        let expiration = expiration(&mut kept, "expiration")?;
        self.note(KEPT_EXPIRATION, expiration.map(|expiration| expiration.to_string()));
        // Never, for those that are kept, is as long as a span can be.
        self.patch.kept_expires = Some(expiration.map(|ms| span_of(ms).unwrap_or(FOREVER)));
        self.patch.delete_evicted = Some(kept.flag("deleteEvicted")?.unwrap_or(true));
        kept.end()
    }

    /// What a new sandbox has that its request does not say.
    pub(crate) fn with_defaults(mut self, snapshots: Option<u64>) -> Self {
        let patch = &mut self.patch;
        patch.session_timeout.get_or_insert(Some(TIMEOUT));
        // Sessions end by their time limit, never because nobody is connected.
        patch.idle_timeout = Some(None);
        let persistent = *patch.persistent.get_or_insert(true);
        patch.snapshot_always = Some(true);
        patch.expires = Some(lifetime(persistent));
        patch.millicpus.get_or_insert(2000);
        patch.memory.get_or_insert(Size(4096 << 20));
        if patch.snapshot_expires.is_none() {
            patch.snapshot_expires = Some(span_of(snapshots.unwrap_or(SNAPSHOTS)));
            // Returned where it is a promise of the endpoint, and not only the default.
            let told = snapshots.map(|ms| ms.to_string());
            patch.notes.extend(told.map(|told| (EXPIRATION.to_owned(), Some(told))));
        }
        patch.keep_last.get_or_insert(None);
        patch.purpose = Some("vercel".to_owned());
        self
    }
}

/// As long as a span can be for a snapshot that never expires: a hundred years.
pub(crate) const FOREVER: Span = Span(36_500 * DAY);

/// How long an unused sandbox stays: one that can be resumed for good, another as long as theirs
/// does.
pub(crate) fn lifetime(persistent: bool) -> Span {
    if persistent { FOREVER } else { Span(14 * DAY) }
}

/// Milliseconds of 0, for never, or a day at least.
pub(crate) fn expiration(fields: &mut Fields, name: &str) -> Result<Option<u64>, VercelError> {
    match fields.number(name, 0..=3650 * DAY)? {
        Some(ms) if ms != 0 && ms < DAY => {
            Err(VercelError::bad(format!("`{name}` should be 0 or >= {DAY}.")))
        }
        other => Ok(other),
    }
}

/// The span that an expiration means; `None` is never.
pub(crate) fn span_of(expiration: u64) -> Option<Span> {
    (expiration != 0).then_some(Span(expiration))
}

/// A label that is kept and returned.
pub(crate) fn short(name: &str, text: String) -> Result<String, VercelError> {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if (1..=64).contains(&text.len()) && text.chars().all(good) {
        Ok(text)
    } else {
        Err(VercelError::bad(format!("`{name}` should be the name of a region.")))
    }
}

/// The source of a new sandbox.
#[derive(Debug)]
pub(crate) enum Source {
    Image,
    Snapshot(String),
    /// An image, and what is fetched into it.
    Fetched(Fetched),
}

/// Reads where a new sandbox's files come from. `here`: a repository goes into the working directory itself.
pub(crate) fn source(fields: &mut Fields, here: bool) -> Result<Source, VercelError> {
    let Some(mut source) = fields.object("source")? else { return Ok(Source::Image) };
    match source.needed("type")?.as_str() {
        "snapshot" => {
            let id = source.needed("snapshotId")?;
            source.end()?;
            Ok(Source::Snapshot(id))
        }
        kind @ ("git" | "tarball") => {
            let fetched = match kind {
                "git" => source::repository(&mut source, here)?,
                _ => source::archive(&mut source)?,
            };
            source.end()?;
            Ok(Source::Fetched(fetched))
        }
        _ => Err(VercelError::bad(
            "`source.type` should be equal to one of the allowed values [\"git\", \"tarball\", \"snapshot\"].",
        )),
    }
}
