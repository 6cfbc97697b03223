//! Which system calls a sandbox may make.
//!
//! A deny list, with two rules that make it hold in the future as well: a call this list's author
//! did not know (a number above [`NEWEST`]) and a call of a foreign ABI (32 bit, x32) do not exist.
//! The namespaces and the missing capabilities already stop most of what is listed; the filter keeps
//! the kernel code behind these calls out of reach at all. `docs/SECURITY.md` has the reasons,
//! `crates/core/tests/driver/escape.rs` tries each one.
//!
//! The filter is installed in PID 1 once the cage stands, so every command has it and nothing needs
//! to be done per command. It comes without `no_new_privs`: `sudo` must work inside.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

use super::StepError;

/// The newest call the list was checked against: `open_tree_attr`, Linux 6.15. The numbers of the x32
/// ABI carry a high bit and are above this as well.
const NEWEST: u32 = 467;

/// The bits of a socket's type that are not flags.
const SOCK_TYPE_MASK: u64 = 0xf;
/// An obsolete type of socket.
const SOCK_PACKET: u64 = 10;

/// Answered with EPERM, whatever the arguments.
const DENIED: &[libc::c_long] = &[
    // Mounts: the cage is made of them.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // Namespaces: a user namespace of one's own brings back every capability in it.
    libc::SYS_setns,
    libc::SYS_unshare,
    // The kernel itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_nfsservctl,
    libc::SYS_vhangup,
    // The clock is the host's.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    // Keyrings are not namespaced.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Large, privileged or often broken interfaces.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_lookup_dcookie,
    libc::SYS_kcmp,
    // Files by handle: past every directory's permissions.
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // Memory placement, of no use inside and with a history.
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    libc::SYS_set_mempolicy_home_node,
];

/// The same, where only this architecture has the call.
#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[libc::c_long] = &[
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
];
#[cfg(not(target_arch = "x86_64"))]
const DENIED_HERE: &[libc::c_long] = &[];

/// Answered with ENOSYS: programs probe for these and have another way.
const ABSENT: &[libc::c_long] = &[
    // Its flags are behind a pointer, where no filter can look. The C library falls back to clone.
    libc::SYS_clone3,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Mounts of the newest kind.
    457, // statmount
    458, // listmount
    467, // open_tree_attr
];

/// Answered with EPERM to helpers as well: they work on files, and have no business with others.
const DENIED_TO_HELPERS: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_chroot,
    libc::SYS_mknodat,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
];

/// Translates the profile of a helper for the kernel: that of a sandbox, and more.
pub(crate) fn compile_for_helper() -> Result<BpfProgram, StepError> {
    compile_with(DENIED_TO_HELPERS)
}

/// Translates the profile for the kernel.
pub(super) fn compile() -> Result<BpfProgram, StepError> {
    compile_with(&[])
}

fn compile_with(more: &[libc::c_long]) -> Result<BpfProgram, StepError> {
    let step = "write the system call filter";
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let rules = rules().map_err(|e| StepError::new(step, e))?;
    let by_argument = SeccompFilter::new(rules, SeccompAction::Allow, denied, ARCH)
        .map_err(|e| StepError::new(step, e))?;
    let by_argument: BpfProgram = by_argument.try_into().map_err(|e| StepError::new(step, e))?;
    let mut program = by_number(more);
    program.extend(by_argument);
    Ok(program)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type BadRule = seccompiler::BackendError;

fn rules() -> Result<Rules, BadRule> {
    let mut rules = Rules::new();
    // Threads and processes yes, namespaces no. One rule for each flag: any of them is enough.
    let namespaces = [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWCGROUP,
    ];
    let flagged = |flag: i32| {
        let flag = flag as u64;
        when(&[(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flag), flag)])
    };
    let clone = namespaces.into_iter().map(flagged).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_clone, clone);

    // Unix, IPv4, IPv6 and netlink sockets, and no other family: packet, vsock, the kernel's
    // cryptography and dozens of forgotten protocols stay out of reach.
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let other_family =
        families.map(|family| (0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family as u64));
    // The kernel still turns the type `SOCK_PACKET` into a packet socket, whatever the family says.
    let packet = || {
        let (mask, kind) = (SOCK_TYPE_MASK, SOCK_PACKET);
        when(&[(1, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask), kind)])
    };
    rules.insert(libc::SYS_socket, vec![when(&other_family)?, packet()?]);
    rules.insert(libc::SYS_socketpair, vec![when(&other_family)?, packet()?]);

    // Typing into a terminal of someone else's, the console's own tricks, and line disciplines: modem
    // protocols in the kernel, which it loads as modules for any program.
    let typing = [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCSETD]
        .map(|request| when(&[(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, request)]));
    rules.insert(libc::SYS_ioctl, typing.into_iter().collect::<Result<_, _>>()?);

    // Plain Linux, 32 bit address layout, and "what is it now?"; other personalities switch
    // protections off.
    let usual = [0u64, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
    let odd = usual.map(|value| (0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value));
    rules.insert(libc::SYS_personality, vec![when(&odd)?]);
    Ok(rules)
}

fn when(conditions: &[(u8, SeccompCmpArgLen, SeccompCmpOp, u64)]) -> Result<SeccompRule, BadRule> {
    let conditions = conditions
        .iter()
        .map(|(arg, length, op, value)| {
            SeccompCondition::new(*arg, length.clone(), op.clone(), *value)
        })
        .collect::<Result<_, _>>()?;
    SeccompRule::new(conditions)
}

/// The checks that need no argument, which come first: foreign ABIs, the future, [`ABSENT`] and
/// [`DENIED`].
///
/// Written by hand, one instruction for a call, because its length is paid at every start: the kernel
/// runs a new filter once for every call there is, to know which it may let through unseen.
///
/// ```text
///     load arch; not ours? -> absent
///     load number; newer than the list? -> absent
///     number = each of ABSENT? -> absent
///     number = each of DENIED? -> denied
///     go on behind
/// absent: return ENOSYS
/// denied: return EPERM
/// ```
fn by_number(more: &[libc::c_long]) -> BpfProgram {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
    const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const ABOVE: u16 = 0x25; // BPF_JMP | BPF_JGT | BPF_K
    const ANSWER: u16 = 0x06; // BPF_RET | BPF_K
    const NUMBER_AT: u32 = 0;
    const ARCH_AT: u32 = 4;
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let answer = |errno: i32| step(ANSWER, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32);
    let denied = DENIED.len() + DENIED_HERE.len() + more.len();
    // How many instructions a jump skips. The tests run every number through the result.
    let far = |skipped: usize| u8::try_from(skipped).unwrap_or(u8::MAX);

    let listed = ABSENT.len() + denied;
    let mut program = vec![
        step(LOAD, 0, 0, ARCH_AT),
        step(EQUAL, 0, far(listed + 3), AUDIT_ARCH),
        step(LOAD, 0, 0, NUMBER_AT),
        step(ABOVE, far(listed + 1), 0, NEWEST),
    ];
    for (at, call) in ABSENT.iter().enumerate() {
        program.push(step(EQUAL, far(listed - at), 0, *call as u32));
    }
    for (at, call) in DENIED.iter().chain(DENIED_HERE).chain(more).enumerate() {
        program.push(step(EQUAL, far(denied - at + 1), 0, *call as u32));
    }
    program.extend([step(JUMP, 0, 0, 2), answer(libc::ENOSYS), answer(libc::EPERM)]);
    program
}

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;

#[cfg(test)]
mod tests {
    use super::{
        ABSENT, AUDIT_ARCH, DENIED, DENIED_HERE, DENIED_TO_HELPERS, NEWEST, by_number, compile,
        rules,
    };

    /// What a filter answers to a call without arguments; `None` when it runs past its end.
    fn run(program: &[seccompiler::sock_filter], arch: u32, number: u32) -> Option<u32> {
        let (mut at, mut value) = (0, 0);
        loop {
            let step = program.get(at)?;
            at += 1;
            match step.code {
                0x20 => value = if step.k == 4 { arch } else { number },
                0x05 => at += step.k as usize,
                0x15 => at += usize::from(if value == step.k { step.jt } else { step.jf }),
                0x25 => at += usize::from(if value > step.k { step.jt } else { step.jf }),
                0x06 => return Some(step.k & 0xffff),
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn every_number_gets_the_answer_it_is_listed_under() {
        for more in [&[][..], DENIED_TO_HELPERS] {
            check(more);
        }
    }

    fn check(more: &[libc::c_long]) {
        let program = by_number(more);
        let listed = |list: &[libc::c_long], number: u32| list.contains(&i64::from(number));
        for number in (0..600).chain([0x4000_0000, 0x4000_0000 + 165, u32::MAX]) {
            let expected = if number > NEWEST || listed(ABSENT, number) {
                Some(libc::ENOSYS as u32)
            } else if [DENIED, DENIED_HERE, more].iter().any(|list| listed(list, number)) {
                Some(libc::EPERM as u32)
            } else {
                None
            };
            assert_eq!(run(&program, AUDIT_ARCH, number), expected, "call {number}");
            assert_eq!(run(&program, 0x4000_0003, number), Some(libc::ENOSYS as u32), "32 bit");
        }
    }

    #[test]
    fn the_profile_compiles_and_is_short() {
        let program = compile().unwrap();
        assert!(program.len() < 250, "{} instructions slow every start", program.len());
    }

    #[test]
    fn conditions_are_only_on_calls_that_are_otherwise_allowed() {
        for call in rules().unwrap().keys() {
            assert!(!DENIED.contains(call) && !DENIED_HERE.contains(call), "{call}");
        }
    }
}
