//! Sessions: found by their id whichever sandbox they are of, listed, extended.

use std::time::Duration;

use super::lifecycle::Phase;
use super::{Engine, Error, Inner, Result};
use crate::db::{Page, Paged};
use crate::model::{Command, Name, Sandbox, Session, SessionId, Span, now};

/// How long a machine may take to say what it has used.
const USAGE_WAIT: Duration = Duration::from_secs(1);

impl Engine {
    /// Finds a session and the sandbox it is of.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSession`] when no sandbox of the project has one of that id.
    pub async fn session(&self, project: &Name, id: &SessionId) -> Result<(Sandbox, Session)> {
        let (sandbox, session) = self.inner.find_session(project, id).await?;
        Ok((sandbox, self.inner.with_usage(session).await))
    }

    /// Lists a sandbox's sessions, newest first unless told otherwise.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn sessions(
        &self,
        project: &Name,
        name: &Name,
        page: &Page,
    ) -> Result<Paged<Session>> {
        self.project_sessions(project, Some(name), page).await
    }

    /// Lists the sessions of a sandbox, or of all of a project.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn project_sessions(
        &self,
        project: &Name,
        name: Option<&Name>,
        page: &Page,
    ) -> Result<Paged<Session>> {
        let found = match name {
            Some(name) => {
                let sandbox = self.inner.find(project, name).await?;
                self.inner.db.sessions(&sandbox.id, page).await?
            }
            None => self.inner.db.project_sessions(project, page).await?,
        };
        let mut found = found.map(|session| self.inner.session_now(session));
        for session in found.items.iter_mut().filter(|session| session.ended_at.is_none()) {
            *session = self.inner.with_usage(session.clone()).await;
        }
        Ok(found)
    }

    /// Lists the commands of a session.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSession`] when no sandbox of the project has one of that id.
    pub async fn session_commands(
        &self,
        project: &Name,
        id: &SessionId,
        page: &Page,
    ) -> Result<Paged<Command>> {
        let (sandbox, _) = self.inner.find_session(project, id).await?;
        let found = self.inner.db.session_commands(id, page).await?;
        Ok(found.map(|command| {
            // How one ended is told before it is on record.
            let tracked = self.inner.tracked(&sandbox.id, &command.id);
            tracked.map_or(command, |tracked| tracked.record())
        }))
    }

    /// Lets the session under way last longer, by exactly `by`. One without a limit stays without.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NotRunning`] when there is none, [`Error::SessionEnded`] when it is not the one
    /// that is meant.
    pub async fn extend(
        &self,
        project: &Name,
        name: &Name,
        by: Span,
        session: Option<SessionId>,
    ) -> Result<Session> {
        if by.0 == 0 {
            return Err(Error::invalid("extend", "by more than 0"));
        }
        let more = jiff::SignedDuration::from_millis(i64::try_from(by.0).unwrap_or(i64::MAX));
        let (id, name) = (self.inner.find(project, name).await?.id, name.clone());
        let work = self.inner.turn(id, move |inner, slot| async move {
            let live = slot.live().ok_or(Error::NotRunning(name))?;
            require_session(&live.session(), session.as_ref())?;
            let Some(deadline) = live.session().deadline else { return Ok(live.session()) };
            let later = deadline
                .checked_add(more)
                .map_err(|_| Error::invalid("extend", "the end of time is nearer"))?;
            let session = live.change_session(|session| session.deadline = Some(later));
            inner.keep_session(&session).await?;
            Ok(session)
        });
        work.await
    }
}

impl Inner {
    async fn find_session(&self, project: &Name, id: &SessionId) -> Result<(Sandbox, Session)> {
        let none = || Error::NoSession(id.clone());
        let session = self.db.session(id).await?.ok_or_else(none)?;
        let sandbox = self.db.sandbox_by_id(&session.sandbox).await?;
        let sandbox = sandbox
            .filter(|sandbox| sandbox.project == *project && sandbox.phase() != Phase::Deleted)
            .ok_or_else(none)?;
        Ok((sandbox, self.session_now(session)))
    }

    /// A session with what its machine has used so far, if it is under way.
    async fn with_usage(&self, mut session: Session) -> Session {
        let live = self.live(&session.sandbox).filter(|live| live.session().id == session.id);
        let Some(live) = live.filter(|_| session.ended_at.is_none()) else { return session };
        // A machine that is being taken down has nothing to tell, and its end counts.
        let asked = tokio::time::timeout(USAGE_WAIT, live.driver.usage(&live.key)).await;
        if let Ok(Ok(usage)) = asked {
            session.count_machine(usage);
        }
        session.count_wall(now());
        session
    }

    /// A session as it is now, which the index may not know yet.
    fn session_now(&self, session: Session) -> Session {
        let live = self.live(&session.sandbox).map(|live| live.session());
        live.filter(|live| live.id == session.id).unwrap_or(session)
    }
}

/// Whether a session is the one that is meant, if one is.
pub(super) fn require_session(session: &Session, meant: Option<&SessionId>) -> Result<()> {
    match meant {
        Some(meant) if *meant != session.id => Err(Error::SessionEnded { session: meant.clone() }),
        _ => Ok(()),
    }
}
