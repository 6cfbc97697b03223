//! Requests that only an agent in a microVM is sent: assemble the root, renew after a restore, freeze, look at changes, export.

use std::rc::Rc;

use sandkeep_proto::link::{Failure, Renew, Reply, Request, VERSION};

use super::Agent;
use super::files::worker;
use crate::machine::Machine;
use crate::serve::error::RequestError;
use crate::serve::link::outbound::Outbound;

/// Whether a request can be carried out now.
pub(super) fn allowed(agent: &Agent, request: &Request) -> Result<(), RequestError> {
    agent.machine.as_ref().map_or(Ok(()), |machine| machine.allows(request))
}

/// Carries it out.
pub(super) fn act(agent: &Rc<Agent>, out: &Rc<Outbound>, stream: u32, request: Request) {
    let Some(machine) = agent.machine.clone() else {
        let problem = RequestError::new(Failure::Invalid, "this sandbox shares its host's kernel");
        return out.reply(stream, &problem.reply());
    };
    match request {
        Request::Assemble(plan) => {
            worker::answer(agent, out, stream, move || machine.assemble(&plan).map(|()| Reply::Ok));
        }
        Request::Renew(renew) => match begin_again(agent, &machine, &renew) {
            // What is written to disks may have to wait for them.
            Ok(reply) if renew.machine_id => {
                worker::in_turn(&machine, out, stream, move |machine| {
                    become_another(machine, &renew, reply)
                });
            }
            // The rest does not: a thread of its own takes longer than the work, where it is emulated.
            Ok(reply) => {
                let done = become_another(&machine, &renew, reply);
                out.reply(stream, &done.unwrap_or_else(RequestError::reply));
            }
            Err(problem) => out.reply(stream, &problem.reply()),
        },
        Request::Freeze => {
            worker::in_turn(&machine, out, stream, |machine| machine.freeze().map(|()| Reply::Ok));
        }
        Request::Thaw => {
            worker::in_turn(&machine, out, stream, |machine| machine.thaw().map(|()| Reply::Ok));
        }
        Request::Look { saved } => {
            worker::answer(agent, out, stream, move || {
                machine.look(saved).map(|looked| Reply::Looked(Box::new(looked)))
            });
        }
        Request::Export { part } => {
            worker::moving(agent, out, stream, move |task| machine.export(part, task));
        }
        _ => {
            let problem = RequestError::new(Failure::Fault, "the request is not for machines");
            out.reply(stream, &problem.reply());
        }
    }
}

fn become_another(machine: &Machine, renew: &Renew, reply: Reply) -> Result<Reply, RequestError> {
    match &renew.identity {
        Some(identity) => machine.become_another(identity, renew.machine_id).map(|()| reply),
        None => Ok(reply),
    }
}

/// Takes in the time and randomness, and only then draws a name for this run.
fn begin_again(agent: &Agent, machine: &Machine, renew: &Renew) -> Result<Reply, RequestError> {
    machine.take_in(&renew.now)?;
    let generation = super::generation()
        .map_err(|error| RequestError::new(Failure::Fault, format!("no random bytes: {error}")))?;
    agent.generation.replace(generation.clone());
    Ok(Reply::Hello { version: VERSION, generation })
}
