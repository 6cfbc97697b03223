//! Sessions: find, list, extend.

use crate::db::{Page, Paged};
use crate::engine::session::sessions::require_session;
use crate::engine::{Engine, Error, Opened, Result};
use crate::model::{Command, Name, Sandbox, Session, SessionId, Span};

impl Engine {
    /// Finds a session and the sandbox it is of.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSession`] when no sandbox of the project has one of that id.
    pub async fn session(&self, project: &Name, id: &SessionId) -> Result<(Sandbox, Session)> {
        let (sandbox, session) = self.parts.sessions.find_session(project, id).await?;
        Ok((sandbox, self.parts.sessions.with_usage(session).await))
    }

    /// Lists a sandbox's sessions, newest first by default.
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
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.sessions.look_before_shown(&sandbox.id).await;
        self.parts.sessions.looked(&sandbox.id, None).await;
        self.project_sessions(project, Some(name), page).await
    }

    /// A sandbox with what the machine of its session has used so far.
    pub async fn with_usage(&self, opened: Opened) -> Opened {
        let session = match opened.session {
            Some(session) => Some(self.parts.sessions.with_usage(session).await),
            None => None,
        };
        Opened { session, ..opened }
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
                let sandbox = self.parts.lifecycle.find(project, name).await?;
                self.parts.context.db.sessions(&sandbox.id, page).await?
            }
            None => self.parts.context.db.project_sessions(project, page).await?,
        };
        let mut found = found.map(|session| self.parts.sessions.session_now(session));
        for session in found.items.iter_mut().filter(|session| session.ended_at.is_none()) {
            *session = self.parts.sessions.with_usage(session.clone()).await;
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
        let (sandbox, _) = self.parts.sessions.find_session(project, id).await?;
        let found = self.parts.context.db.session_commands(id, page).await?;
        Ok(found.map(|command| {
            // The end of a command is reported before it is on record.
            let tracked = self.parts.sessions.tracked(&sandbox.id, &command.id);
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
        let (id, name) = (self.parts.lifecycle.find(project, name).await?.id, name.clone());
        let work = self.parts.lifecycle.turn(id, move |lifecycle, slot| async move {
            let live = slot.live().ok_or(Error::NotRunning(name))?;
            require_session(&live.session(), session.as_ref())?;
            let Some(deadline) = live.session().deadline else { return Ok(live.session()) };
            let later = deadline
                .checked_add(more)
                .map_err(|_| Error::invalid("extend", "the end of time is nearer"))?;
            let session = live.change_session(|session| session.deadline = Some(later));
            lifecycle.records.keep_session(&session).await?;
            Ok(session)
        });
        Ok(self.parts.sessions.with_usage(work.await?).await)
    }
}
