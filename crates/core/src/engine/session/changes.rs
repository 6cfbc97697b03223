//! Which files each command changed.
//!
//! ```text
//! command starts ── waits a moment for a look that is under way
//! command ends ──> look: upper directory against the index of the last look (`store/layer/changes.rs`)
//!                    └─> commands that were alive since then get what was found (`running/changes.rs`)
//!                          └─> counts into the command's record, paths into a file beside its log
//! ```
//!
//! Every wait for a look is short: a command that starts waits [`START_WAITS`], the record of one
//! that ended [`RECORD_WAITS`]. If the look takes longer, because there are very many files, the
//! records say that their commands overlap, and the counts are added to the record when they are
//! known.
//!
//! A microVM's files are on a disk of its own, so its agent looks (`guest`).
//!
//! What all looks of a session found is added up in the session's record. What was written after the last look is looked at
//! when the session is over, in the layer that was sealed: no caller waits for that, and the record
//! is written again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sandkeep_proto::link::Looked;
use sandkeep_upper::{Change, ChangeKind, ChangeList, Changes, Under};

use crate::db::Page;
use crate::driver::Relayer;
use crate::engine::error::error_chain;
use crate::engine::running::changes::{
    ChangeRecord, EarlierLayer, FoundChanges, LayerNames, MOST_LISTED, MOST_TEXT,
};
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::measured::junk_warned_of;
use crate::engine::running::tracked::Tracked;
use crate::engine::session::Sessions;
use crate::engine::{Error, Result};
use crate::model::{Command, CommandId, LayerId, Sandbox, SandboxId, Session, SessionChanges};
use crate::store::ListedChanges;

/// How long the start of a command waits for a look that is under way.
const START_WAITS: Duration = Duration::from_millis(1);
/// The same for a microVM, whose agent has to be asked.
const START_WAITS_FOR_GUEST: Duration = Duration::from_millis(20);
/// How long the record of a command that ended waits for its look.
const RECORD_WAITS: Duration = Duration::from_millis(20);
/// How long a request for a sandbox waits for a look at it.
const SHOWN_WAITS: Duration = Duration::from_millis(50);
/// How long a request for the changes of a command waits for its look.
const READER_WAITS: Duration = Duration::from_secs(5);
/// How long the end of a microVM waits for the last look at its files. There is nothing to wait for unless something may have been
/// written since the look before.
const END_WAITS: Duration = Duration::from_millis(100);
/// How many looks are under way at a time.
pub(in crate::engine) const LOOKS_AT_ONCE: usize = 2;

impl Sessions {
    /// A command is about to start: the files it finds should be known.
    pub(in crate::engine) async fn before_start(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        command: &CommandId,
    ) {
        if !self.context.settings.record_changes {
            return;
        }
        if live.changes.wants_look() {
            let mut looks = live.changes.looks();
            self.look_soon(live);
            let patience = match live.driver.relayer() {
                Some(_) => START_WAITS,
                None => START_WAITS_FOR_GUEST,
            };
            let _ = tokio::time::timeout(patience, looks.changed()).await;
        }
        live.changes.starts(command);
    }

    /// A command has ended: what did it change? `None` if that takes longer; the record is completed then.
    pub(in crate::engine) async fn after_end(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        command: &CommandId,
    ) -> Option<ChangeRecord> {
        live.changes.ends(command);
        self.look_soon(live);
        tokio::time::timeout(RECORD_WAITS, live.changes.known(command)).await.ok().flatten()
    }

    /// Completes the record of a command whose look took long. If the engine shuts down before the look, the
    /// record gets what earlier looks saw, and says that it is not complete.
    pub(in crate::engine) fn complete_later(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        command: Command,
    ) {
        let (this, live) = (Arc::clone(self), Arc::clone(live));
        self.context.tasks.spawn(async move {
            let shutdown = this.context.tasks.shutdown();
            let known = shutdown.run_until_cancelled(live.changes.known(&command.id)).await;
            let record = known.unwrap_or_else(|| live.changes.give_up(&command.id));
            let Some(record) = record else { return };
            let mut command = command;
            this.keep_changes(&mut command, record).await;
            if let Err(error) = this.records.keep_command(&command).await {
                tracing::warn!(command = %command.id, error = error_chain(&error), "what a command changed was not recorded");
            }
            live.changes.recorded(&command.id);
        });
    }

    /// Puts the counts into a command's record, and the paths beside its log.
    pub(in crate::engine) async fn keep_changes(
        &self,
        command: &mut Command,
        record: ChangeRecord,
    ) {
        let ChangeRecord { counts, changes } = record;
        if !changes.is_empty() {
            let list = ListedChanges::new(&changes);
            let kept = self.store.write_changes(&command.sandbox, &command.id, list).await;
            if let Err(error) = kept {
                tracing::warn!(command = %command.id, %error, "the paths that a command changed were not recorded");
            }
        }
        command.changes = Some(counts);
    }

    /// Looks at the files of a sandbox as soon as it may.
    pub(in crate::engine) fn look_soon(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        if !self.context.settings.record_changes {
            return;
        }
        let (this, live) = (Arc::clone(self), Arc::clone(live));
        self.context.tasks.spawn(async move {
            let _one = live.changes.looking.lock().await;
            // The one before may have seen everything.
            if !live.changes.wants_look() {
                return;
            }
            if !this.context.tasks.sleep(live.changes.rest()).await {
                return;
            }
            this.look(&live).await;
        });
    }

    async fn look(&self, live: &Arc<RunningSandbox>) {
        let Ok(_few) = self.looks.acquire().await else { return };
        while let Some(earlier) = live.changes.next_earlier() {
            let EarlierLayer { layer, chain, names, .. } = &earlier;
            let found = self.look_at_layer(live, None, (layer, chain), names.clone()).await;
            live.changes.earlier_looked(&earlier, found.ok().as_ref());
        }
        let sandbox = live.sandbox();
        let begun = Instant::now();
        let Some(layer) = sandbox.open_layer() else {
            // The session is over. There are no further looks, so waiting callers are answered.
            live.changes.look_ends(None, begun.elapsed());
            return;
        };
        let names = live.changes.look_begins(layer);
        let over = *live.changes.over.lock().await;
        let at = (layer, sandbox.open_chain());
        let found = match live.driver.relayer() {
            // What the sandbox leaves out of its snapshots is gone, and was not deleted.
            Some(_) if over && !sandbox.config.exclude.is_empty() => Err(Error::SessionOver),
            Some(relayer) => {
                self.look_at_layer(live, Some(relayer).filter(|_| !over), at, names).await
            }
            None => self.look_in_guest(live, false).await,
        };
        let found = match found {
            // Nothing was in it when it was to be sealed, so it was removed.
            Err(Error::Store(error)) if over && error.is_not_found() => {
                Some(FoundChanges::nothing())
            }
            Err(error) => {
                tracing::debug!(sandbox = %sandbox.name, error = error_chain(&error), "its files were not looked at");
                None
            }
            Ok(found) => Some(found),
        };
        live.changes.look_ends(found, begun.elapsed());
        self.complete_session(live).await;
    }

    /// Compares a layer, on top of a chain, with its names at the last look. Without `relayer`
    /// nothing writes to it any more.
    async fn look_at_layer(
        &self,
        live: &RunningSandbox,
        relayer: Option<&dyn Relayer>,
        (layer, chain): (&LayerId, &[LayerId]),
        names: LayerNames,
    ) -> Result<FoundChanges> {
        let (before, known) = match names {
            LayerNames::Here(index) => (index, true),
            LayerNames::InGuest | LayerNames::Unknown => (Arc::default(), false),
        };
        // The session may end meanwhile, and what it stood on may be merged.
        let hold = self.store.hold();
        hold.layers(chain).await;
        hold.layers(std::slice::from_ref(layer)).await;
        let seal = live.seal.flag();
        // The look comes to every name, so it measures the open layer for its seal on the way. A
        // machine that has just ended does not report its processes; what the look found is true
        // all the same.
        let sandbox = live.sandbox();
        let open = relayer.filter(|_| sandbox.open_layer() == Some(layer));
        let uses = match open {
            Some(relayer) => live.measurable(&sandbox, relayer).await.unwrap_or_default(),
            None => None,
        };
        let rules = uses.map(|_| junk_warned_of(&sandbox)).transpose()?;
        let (look, measured) = self.store.look_at_open(layer, chain, before, seal, rules).await?;
        if let (Some(relayer), Some(uses), Some(measured)) = (open, uses, measured) {
            let _ = live.keep_measurement(&sandbox, relayer, uses, measured).await;
        }
        let alone = match relayer {
            Some(relayer) => relayer.alone(&live.key).await.unwrap_or(false),
            None => true,
        };
        Ok(FoundChanges {
            changes: known.then_some(look.changes),
            complete: look.complete,
            alone,
            names: look
                .index
                .map_or(LayerNames::Unknown, |index| LayerNames::Here(Arc::new(index))),
            unsaved: None,
        })
    }

    /// Asks the agent of a microVM.
    async fn look_in_guest(&self, live: &RunningSandbox, saved: bool) -> Result<FoundChanges> {
        let looked = live.guest_at_rest().await?.look(saved).await?;
        Ok(FoundChanges {
            changes: looked.known.then(|| as_changes(&looked)),
            complete: looked.complete,
            alone: looked.alone,
            names: LayerNames::InGuest,
            unsaved: looked.unsaved,
        })
    }

    /// The files of a running microVM are in a snapshot now.
    pub(in crate::engine) fn saved_in_guest(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        if !self.context.settings.record_changes {
            return;
        }
        let (this, live) = (Arc::clone(self), Arc::clone(live));
        self.context.tasks.spawn(async move {
            let _one = live.changes.looking.lock().await;
            let Some(layer) = live.sandbox().open_layer().cloned() else { return };
            let begun = Instant::now();
            live.changes.look_begins(&layer);
            let found = this.look_in_guest(&live, true).await;
            live.changes.look_ends(found.ok(), begun.elapsed());
        });
    }

    /// What is shown of the files of a running sandbox should be of now, if that takes a moment only.
    pub(in crate::engine) async fn look_before_shown(self: &Arc<Self>, sandbox: &SandboxId) {
        let Some(live) = self.turns.live(sandbox).filter(|live| live.changes.wants_look()) else {
            return;
        };
        let mut looks = live.changes.looks();
        self.look_soon(&live);
        let _ = tokio::time::timeout(SHOWN_WAITS, looks.changed()).await;
    }

    /// Nothing but the agent is left in a machine that is about to end. One that looks at its files itself does so for the last time:
    /// what processes wrote until now is in the session's count then. If that takes longer, the count says that it is not complete.
    pub(in crate::engine) async fn look_before_end(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        let looks_itself = live.driver.relayer().is_none();
        if !looks_itself || !self.context.settings.record_changes || !live.changes.may_have_more() {
            return;
        }
        let (this, live) = (Arc::clone(self), Arc::clone(live));
        // A task: a look that was begun is brought to its end.
        let look = self.context.tasks.spawn(async move {
            let _one = live.changes.looking.lock().await;
            if live.changes.may_have_more() {
                this.look(&live).await;
            }
        });
        let _ = tokio::time::timeout(END_WAITS, look).await;
    }

    /// Puts the end of a session on record, with what was changed in it. Where something may have been changed since the last look,
    /// and is kept, the record is completed later.
    pub(in crate::engine) async fn end_on_record(
        self: &Arc<Self>,
        live: Option<&Arc<RunningSandbox>>,
        mut session: Session,
        kept: bool,
    ) -> Result<Session> {
        let Some(live) = live else {
            session.changes = self.changes_on_record(&session).await?;
            self.records.keep_session(&session).await?;
            return Ok(session);
        };
        let more = live.changes.may_have_more();
        if more && !kept {
            live.changes.give_up_session();
        }
        let mut over = live.changes.over.lock().await;
        *over = true;
        session.changes = live.changes.whole_session();
        self.records.keep_session(&session).await?;
        drop(over);
        if more && kept && self.context.settings.record_changes {
            let (this, live) = (Arc::clone(self), Arc::clone(live));
            self.context.tasks.spawn(async move {
                let _one = live.changes.looking.lock().await;
                if live.changes.may_have_more()
                    && this.context.tasks.sleep(live.changes.rest()).await
                {
                    this.look(&live).await;
                }
            });
        }
        Ok(session)
    }

    /// After a look at a session that is over: its record was written without that.
    async fn complete_session(&self, live: &RunningSandbox) {
        let over = live.changes.over.lock().await;
        let (id, changes) = (live.session().id, live.changes.whole_session());
        if !*over || changes.is_none() {
            return;
        }
        let kept = async {
            let Some(mut session) = self.db.session(&id).await? else { return Ok(()) };
            let sandbox = self.db.sandbox_by_id(&session.sandbox).await?;
            if session.changes == changes || sandbox.is_none_or(|one| one.deletion().is_some()) {
                return Ok(());
            }
            session.changes = changes;
            self.records.keep_session(&session).await
        };
        let kept: Result<()> = kept.await;
        if let Err(error) = kept {
            tracing::warn!(session = %id, error = error_chain(&error), "what was changed in a session was not recorded");
        }
    }

    /// What was changed in a session at least, by the records of its commands: what looks have found besides was lost with an earlier
    /// daemon.
    pub(in crate::engine) async fn changes_on_record(
        &self,
        session: &Session,
    ) -> Result<Option<SessionChanges>> {
        if !self.context.settings.record_changes {
            return Ok(session.changes);
        }
        let commands = self.db.session_commands(&session.id, &Page::all()).await?.items;
        let (mut exact, mut shared) = (SessionChanges::default(), SessionChanges::default());
        for one in commands.iter().filter_map(|command| command.changes.as_ref()) {
            let found = SessionChanges {
                created: one.created,
                modified: one.modified,
                deleted: one.deleted,
                bytes: one.bytes,
                complete: false,
            };
            match one.exact {
                true => exact = combined(exact, found, u64::saturating_add),
                // Several have the same changes.
                false => shared = combined(shared, found, u64::max),
            }
        }
        let found = combined(exact, shared, u64::saturating_add);
        let found = combined(found, session.changes.unwrap_or_default(), u64::max);
        Ok(Some(SessionChanges { complete: false, ..found }))
    }

    /// What a command changed: its record, and the paths. Waits for a look that is under way.
    pub(in crate::engine) async fn changes_of(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        id: &CommandId,
    ) -> Result<(Command, ListedChanges)> {
        let alive = self.tracked(&sandbox.id, id).filter(|tracked| tracked.outcome().is_none());
        if let Some((live, tracked)) = self.turns.live(&sandbox.id).zip(alive) {
            // It still runs: what it changed so far.
            let look = async {
                let _one = live.changes.looking.lock().await;
                self.look(&live).await;
            };
            let _ = tokio::time::timeout(READER_WAITS, look).await;
            if let Some(ChangeRecord { counts, changes }) = live.changes.so_far(id) {
                let command = Command { changes: Some(counts), ..tracked.record() };
                return Ok((command, ListedChanges::new(&changes)));
            }
        }
        self.looked(&sandbox.id, Some(id)).await;
        let command = self.find_command(sandbox, id).await?;
        let list = self.store.read_changes(&sandbox.id, id).await?;
        Ok((command, list.unwrap_or_default()))
    }

    /// Waits until the changes of a command, or of all commands that have ended, are on record.
    pub(in crate::engine) async fn looked(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        command: Option<&CommandId>,
    ) {
        let Some(live) = self.turns.live(sandbox) else { return };
        let mut looks = live.changes.looks();
        let known = async {
            loop {
                let waits = match command {
                    Some(id) => {
                        let alive = |tracked: Arc<Tracked>| tracked.outcome().is_none();
                        live.changes.is_open(id) && !self.tracked(sandbox, id).is_some_and(alive)
                    }
                    None => live.changes.is_behind(),
                };
                if !waits || looks.changed().await.is_err() {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(READER_WAITS, known).await;
    }
}

fn combined(
    one: SessionChanges,
    other: SessionChanges,
    by: impl Fn(u64, u64) -> u64,
) -> SessionChanges {
    SessionChanges {
        created: by(one.created, other.created),
        modified: by(one.modified, other.modified),
        deleted: by(one.deleted, other.deleted),
        bytes: by(one.bytes, other.bytes),
        complete: one.complete && other.complete,
    }
}

/// An agent's answer, which may be anything.
fn as_changes(looked: &Looked) -> Changes {
    let bytes = |text: &String| -> Vec<u8> {
        text.chars()
            .map(|char| if char.is_control() { '?' } else { char })
            .collect::<String>()
            .into()
    };
    let [created, modified, deleted] = looked.counts;
    let paths = looked.paths.iter().take(MOST_LISTED).map(|one| Change {
        path: bytes(&one.path),
        kind: match one.change {
            0 => ChangeKind::Created,
            1 => ChangeKind::Modified,
            _ => ChangeKind::Deleted,
        },
        dir: one.dir,
        bytes: one.bytes,
    });
    let more = looked.more.iter().take(MOST_LISTED).map(|(path, counts)| {
        let [created, modified, deleted] = *counts;
        Under { path: bytes(path), created, modified, deleted }
    });
    let mut list = ChangeList::new(paths.collect(), more.collect());
    list.truncate_to(MOST_LISTED, MOST_TEXT);
    Changes { created, modified, deleted, bytes: looked.bytes, list }
}
