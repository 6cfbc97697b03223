//! Sessions: found by their id whichever sandbox they are of, listed, extended.

use std::time::Duration;

use crate::engine::session::Sessions;
use crate::engine::{Error, Result};
use crate::model::lifecycle::Phase;
use crate::model::{Name, Sandbox, Session, SessionId, now};

/// How long a machine may take to say what it has used.
const USAGE_WAIT: Duration = Duration::from_secs(1);

impl Sessions {
    pub(in crate::engine) async fn find_session(
        &self,
        project: &Name,
        id: &SessionId,
    ) -> Result<(Sandbox, Session)> {
        let none = || Error::NoSession(id.clone());
        let session = self.db.session(id).await?.ok_or_else(none)?;
        let sandbox = self.db.sandbox_by_id(&session.sandbox).await?;
        let sandbox = sandbox
            .filter(|sandbox| sandbox.project == *project && sandbox.phase() != Phase::Deleted)
            .ok_or_else(none)?;
        Ok((sandbox, self.session_now(session)))
    }

    /// A session with what its machine has used so far, if it is under way.
    pub(in crate::engine) async fn with_usage(&self, mut session: Session) -> Session {
        let live = self.turns.live(&session.sandbox).filter(|live| live.session().id == session.id);
        let Some(live) = live.filter(|_| session.ended_at.is_none()) else { return session };
        // A machine that is being stopped has no usage to report, and its end counts.
        let asked = tokio::time::timeout(USAGE_WAIT, live.driver.usage(&live.key)).await;
        if let Ok(Ok(usage)) = asked {
            session.count_machine(usage);
        }
        session.count_wall(now());
        session
    }

    /// A session as it is now, which the index may not know yet.
    pub(in crate::engine) fn session_now(&self, session: Session) -> Session {
        let live = self.turns.live(&session.sandbox).map(|live| live.session());
        live.filter(|live| live.id == session.id).unwrap_or(session)
    }
}

/// Whether a session is the one that is meant, if one is.
pub(in crate::engine) fn require_session(
    session: &Session,
    meant: Option<&SessionId>,
) -> Result<()> {
    match meant {
        Some(meant) if *meant != session.id => Err(Error::SessionEnded { session: meant.clone() }),
        _ => Ok(()),
    }
}
