//! Who may do what: projects, their keys and tokens, idempotency keys, and the secrets of projects.

pub(in crate::engine) mod credentials;
pub(in crate::engine) mod idempotency;
pub(in crate::engine) mod projects;
pub(in crate::engine) mod secrets;
pub(in crate::engine) mod token;

use std::sync::Arc;

use crate::db::Db;
use crate::engine::context::Context;
use crate::engine::references::References;
use crate::engine::tenancy::projects::Projects;
use crate::engine::tenancy::token::Signer;
use crate::keyed_lock::KeyedLock;
use crate::model::Name;

/// Projects, keys, tokens and idempotency keys.
pub(in crate::engine) struct Tenancy {
    db: Arc<dyn Db>,
    context: Arc<Context>,
    references: Arc<References>,
    pub(in crate::engine) projects: Projects,
    signer: Signer,
    /// One call at a time for each idempotency key of a project.
    idempotency: KeyedLock<(Name, String)>,
}

impl Tenancy {
    pub(in crate::engine) fn new(
        context: &Arc<Context>,
        references: &Arc<References>,
        signer: Signer,
    ) -> Arc<Self> {
        Arc::new(Self {
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            references: Arc::clone(references),
            projects: Projects::default(),
            signer,
            idempotency: KeyedLock::default(),
        })
    }
}
