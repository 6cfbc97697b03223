//! Services of a sandbox.

use crate::engine::running::services::ServiceState;
use crate::engine::session::services::{ServiceStatus, declared};
use crate::engine::{Engine, Error, Result, WakeMode};
use crate::model::{Name, Patch, Service};

impl Engine {
    /// Lists a sandbox's services and how they stand. Never wakes.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn services(&self, project: &Name, name: &Name) -> Result<Vec<ServiceStatus>> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        self.parts.turns.recovered(&sandbox.id).await?;
        self.parts.sessions.service_statuses(&sandbox).await
    }

    /// Declares a service, or declares it otherwise. In a running sandbox that takes effect at once.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Config`] when something about it is wrong.
    pub async fn set_service(
        &self,
        project: &Name,
        name: &Name,
        service: Service,
    ) -> Result<ServiceStatus> {
        let which = service.name.clone();
        let patch = Patch { set_services: vec![service], ..Patch::default() };
        let sandbox = self.update(project, name, patch).await?;
        self.parts.sessions.service_status(&sandbox, &which).await
    }

    /// Takes a service away. One that runs is ended.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoService`] when there is none of that name.
    pub async fn remove_service(&self, project: &Name, name: &Name, service: &Name) -> Result<()> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        declared(&sandbox, service)?;
        self.parts.turns.recovered(&sandbox.id).await?;
        let live = self.parts.turns.live(&sandbox.id);
        let running = live.and_then(|live| live.services.get(service));
        let patch = Patch { drop_services: vec![service.clone()], ..Patch::default() };
        self.update(project, name, patch).await?;
        if let Some(running) = running {
            running.ended().await;
        }
        Ok(())
    }

    /// Starts a service, waking its sandbox if need be. One that runs is left alone.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoService`] when there is none of that name.
    pub async fn start_service(
        &self,
        project: &Name,
        name: &Name,
        service: &Name,
    ) -> Result<ServiceStatus> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        declared(&sandbox, service)?;
        self.parts.lifecycle.awake(project, name, &WakeMode::Wake).await?;
        let noted = self.parts.sessions.note_requested_state(&sandbox, service, true).await?;
        let live = noted.ok_or(Error::SessionOver)?;
        let sandbox = live.sandbox();
        self.parts.sessions.run_service(&live, declared(&sandbox, service)?, None, false);
        self.parts.sessions.service_status(&sandbox, service).await
    }

    /// Stops a service, for this session. Never wakes.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoService`] when there is none of that name.
    pub async fn stop_service(
        &self,
        project: &Name,
        name: &Name,
        service: &Name,
    ) -> Result<ServiceStatus> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        declared(&sandbox, service)?;
        let live = self.parts.sessions.note_requested_state(&sandbox, service, false).await?;
        if let Some(running) = live.and_then(|live| live.services.get(service)) {
            running.unwanted.send_replace(true);
            running.ended().await;
            running.set(ServiceState::Stopped);
        }
        self.parts.sessions.service_status(&sandbox, service).await
    }
}
