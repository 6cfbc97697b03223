//! What the settings on the command line mean in the API's words.

use std::collections::BTreeMap;

use sandkeep_client::types::{
    Class, Hook, Hooks, OnIdle, OnJunk, OnSecret, SetGuard, Size, Span, UpdateSandbox,
};

use super::network::wished;
use crate::args::{ClassArg, Count, GuardArg, LargeFilesArg, Limit, OnIdleArg, Settings};
use crate::failure::Failure;

/// Shell strings become `sh -c`: hooks are argument vectors, people write shell.
fn hook(text: &str) -> Hook {
    Hook { argv: vec!["sh".to_owned(), "-c".to_owned(), text.to_owned()], timeout: None }
}

pub(super) fn class(class: ClassArg) -> Class {
    match class {
        ClassArg::Ephemeral => Class::Ephemeral,
        ClassArg::Resumable => Class::Resumable,
        ClassArg::Workspace => Class::Workspace,
    }
}

/// Turns what was written into a change; what was not written stays as it is.
pub(super) fn change(settings: Settings) -> Result<UpdateSandbox, Failure> {
    let span = |span: sandkeep_core::model::Span| Span::Number(span.0);
    let size = |size: sandkeep_core::model::Size| Size::Number(size.0);
    let limit = |limit: Limit| match limit {
        Limit::Never => None,
        Limit::After(after) => Some(span(after)),
    };
    let own = |text: String| Some(text).filter(|text| text != "image");
    let map = |pairs: Vec<(String, String)>| {
        let map: BTreeMap<String, String> = pairs.into_iter().collect();
        Some(map).filter(|map| !map.is_empty())
    };
    let persistent = match (settings.persistent, settings.non_persistent) {
        (true, _) => Some(true),
        (false, true) => Some(false),
        (false, false) => None,
    };
    let hooks = Hooks {
        on_create: settings.on_create.iter().map(|text| hook(text)).collect(),
        on_resume: settings.on_resume.iter().map(|text| hook(text)).collect(),
        validate: settings.validate.as_deref().map(hook),
    };
    Ok(UpdateSandbox {
        image: None,
        driver: settings.driver,
        class: settings.class.map(class),
        persistent,
        owner: settings.owner,
        purpose: settings.purpose,
        expires: settings.expires.map(span),
        tags: map(settings.tags),
        env: map(settings.env),
        cwd: settings.cwd.map(own),
        user: settings.user.map(own),
        vcpus: settings.vcpus.map(|millis| f64::from(millis) / 1000.0),
        memory: settings.memory.map(size),
        pids: settings.pids,
        disk: settings.disk.map(size),
        session_timeout: settings.timeout.map(limit),
        idle_timeout: settings.idle_timeout.map(limit),
        on_idle: settings.on_idle.map(|what| match what {
            OnIdleArg::Run => Some(OnIdle::Run),
            OnIdleArg::Pause => Some(OnIdle::Pause),
            OnIdleArg::Stop => Some(OnIdle::Stop),
            OnIdleArg::Auto => None,
        }),
        hooks: Some(hooks).filter(|hooks| *hooks != Hooks::default()),
        snapshot_expires: settings.snapshot_expires.map(limit),
        keep_last: settings.keep_last.map(|count| match count {
            Count::All => None,
            Count::Only(count) => Some(count),
        }),
        exclude: Some(settings.exclude).filter(|globs| !globs.is_empty()),
        mounts: Some(settings.mounts.into_iter().collect::<BTreeMap<_, _>>())
            .filter(|mounts| settings.no_mounts || !mounts.is_empty()),
        network: wished(&settings.network)?,
        secrets: Some(settings.secrets)
            .filter(|secrets| settings.no_secrets || !secrets.is_empty()),
        ports: Some(settings.publish).filter(|ports| !ports.is_empty()),
        wake_on_request: match (settings.wake_on_request, settings.no_wake_on_request) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        },
        services: None,
        guard: Some(SetGuard {
            secrets: settings.guard.map(|policy| match policy {
                GuardArg::Block => OnSecret::Block,
                GuardArg::Quarantine => OnSecret::Quarantine,
                GuardArg::Warn => OnSecret::Warn,
            }),
            junk: settings.large_files.map(|policy| match policy {
                LargeFilesArg::Off => OnJunk::Off,
                LargeFilesArg::Warn => OnJunk::Warn,
                LargeFilesArg::PromoteOrDrop => OnJunk::PromoteOrDrop,
            }),
            large: settings.large_size.map(size),
            globs: Some(settings.junk).filter(|globs| !globs.is_empty()),
        })
        .filter(|guard| *guard != SetGuard::default()),
    })
}

/// Lays a change's fields over a request that has the same ones.
macro_rules! request_with {
    ($request:ident { $($field:ident: $value:expr),* $(,)? }, $change:expr) => {{
        let change = $change;
        $request {
            $($field: $value,)*
            image: change.image,
            driver: change.driver,
            class: change.class,
            persistent: change.persistent,
            owner: change.owner,
            purpose: change.purpose,
            expires: change.expires,
            tags: change.tags,
            env: change.env,
            cwd: change.cwd,
            user: change.user,
            vcpus: change.vcpus,
            memory: change.memory,
            pids: change.pids,
            disk: change.disk,
            session_timeout: change.session_timeout,
            idle_timeout: change.idle_timeout,
            on_idle: change.on_idle,
            hooks: change.hooks,
            snapshot_expires: change.snapshot_expires,
            keep_last: change.keep_last,
            exclude: change.exclude,
            mounts: change.mounts,
            network: change.network,
            secrets: change.secrets,
            ports: change.ports,
            wake_on_request: change.wake_on_request,
            services: change.services,
            guard: change.guard,
        }
    }};
}
pub(super) use request_with;

#[cfg(test)]
mod tests {
    use sandkeep_client::types::UpdateSandbox;

    use super::change;
    use crate::args::{Count, Limit, Settings};

    #[test]
    fn nothing_written_changes_nothing() {
        assert_eq!(change(Settings::default()).unwrap(), UpdateSandbox::default());
    }

    #[test]
    fn what_takes_a_value_away_is_null() {
        let change = change(Settings {
            idle_timeout: Some(Limit::Never),
            keep_last: Some(Count::All),
            cwd: Some("image".to_owned()),
            validate: Some("git status".to_owned()),
            vcpus: Some(500),
            ..Settings::default()
        })
        .unwrap();
        assert_eq!(
            serde_json::to_string(&change).unwrap(),
            r#"{"cwd":null,"vcpus":0.5,"idle_timeout":null,"hooks":{"validate":{"argv":["sh","-c","git status"]}},"keep_last":null}"#
        );
    }
}
