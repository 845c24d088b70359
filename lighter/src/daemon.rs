// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter start`: services up, agent up, specs published, then questions and signals until it is told to end.
//!
//! The order matters: a spec is published only when the hook that it names would be answered. Specs stay when
//! the daemon ends, so that a container started without it is refused by the hook with a reason, not by the
//! engine with "unresolvable".

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use lighter_agent::{Agent, AgentConfig, Docker, EngineRecord, GrantView, Limits, Trust};
use lighter_wire::Kind;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::config::Config;
use crate::control::{Reply, Request};
use crate::control_server::ControlServer;
use crate::doctor::{self, DoctorReport, Evidence, Finding};
use crate::status::{GrantLine, StatusReport, Usage};
use crate::supervise::{ServicePlan, Supervisor};
use crate::{facts, hidden, publish};

/// The running daemon, shared by the control server's threads.
pub(crate) struct Daemon {
    config_file: PathBuf,
    config: Mutex<Config>,
    supervisor: Arc<Supervisor>,
    /// Taken out when the daemon ends, while questions may still be under way.
    agent: RwLock<Option<Agent>>,
    started: Instant,
}

/// Runs the daemon with the configuration at `config_file` until it is stopped.
///
/// # Errors
/// When the configuration is invalid, another daemon holds the state directory, or something that it cannot
/// do without fails.
pub(crate) fn run(config_file: &Path) -> anyhow::Result<()> {
    let config = Config::load(config_file)?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot watch signals")?;
    let signal_handle = signals.handle();
    make_state_dir(&config)?;
    let supervisor = Arc::new(Supervisor::default());
    let agent =
        Agent::start(agent_config(&config)?, Arc::clone(&supervisor) as Arc<dyn lighter_agent::Services>)
            .context("the agent cannot be started")?;
    supervisor.apply(&plans(&config)?).context("the services cannot be started")?;
    publish::publish(&config)?;
    let daemon = Arc::new(Daemon {
        config_file: config_file.to_owned(),
        config: Mutex::new(config.clone()),
        supervisor,
        agent: RwLock::new(Some(agent)),
        started: Instant::now(),
    });
    let server = {
        let daemon = Arc::clone(&daemon);
        let stop = signal_handle.clone();
        ControlServer::start(&config.daemon.control_socket(), move |request| {
            let reply = daemon.answer(request);
            if *request == Request::Stop {
                stop.close();
            }
            reply
        })?
    };
    tracing::info!(config = %config_file.display(), specs = %config.daemon.spec_dir.display(), "lighter serves");
    for signal in signals.forever() {
        if signal == SIGHUP {
            if let Reply::Failed { reason } = daemon.answer(&Request::Reload) {
                tracing::error!(%reason, "the configuration was not taken");
            }
        } else {
            break;
        }
    }
    tracing::info!("lighter ends");
    server.stop();
    if let Some(agent) = daemon.agent.write().unwrap_or_else(PoisonError::into_inner).take() {
        agent.stop();
    }
    daemon.supervisor.stop();
    Ok(())
}

fn make_state_dir(config: &Config) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let dir = &config.daemon.state_dir;
    // The hook may run as another user (user namespaces), and its socket lies here.
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)
        .with_context(|| format!("cannot make the state directory {}", dir.display()))
}

fn agent_config(config: &Config) -> anyhow::Result<AgentConfig> {
    let uid = rustix::process::geteuid().as_raw();
    let records = config
        .engines
        .docker
        .iter()
        .map(|socket| Box::new(Docker::new(socket.clone(), uid)) as Box<dyn EngineRecord>)
        .collect();
    Ok(AgentConfig {
        state_dir: config.daemon.state_dir.clone(),
        hook_socket: config.daemon.hook_socket(),
        socket_dir: config.daemon.socket_dir(),
        hook_path: facts::hook_path(config)?,
        devices: facts::endpoints(config),
        records,
        trust: Trust {
            uids: config.engines.trusted_uids.iter().copied().collect(),
            cgroups: config.engines.trusted_cgroups.clone(),
        },
        hook_uids: config.engines.hook_uids.iter().copied().collect(),
        limits: Limits {
            record_timeout: Duration::from_millis(config.engines.answer_ms),
            ..Limits::default()
        },
    })
}

/// How to start the service of every device that is on. Pure but for this program's own path.
fn plans(config: &Config) -> anyhow::Result<BTreeMap<Kind, ServicePlan>> {
    let program = std::env::current_exe().context("cannot tell the path of this program")?;
    let mut plans = BTreeMap::new();
    for device in facts::offered(config) {
        let kind = device.kind();
        let settings = hidden::settings_of(kind, config)?;
        let args = vec!["service".to_owned(), kind.to_string(), "--settings".to_owned(), settings];
        plans.insert(kind, ServicePlan { program: program.clone(), args });
    }
    Ok(plans)
}

impl Daemon {
    fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, request: &Request) -> Reply {
        match request {
            Request::Status => Reply::Status(Box::new(self.status())),
            Request::Doctor => Reply::Doctor(Box::new(self.doctor())),
            Request::Reload => match self.reload() {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed { reason: format!("{error:#}") },
            },
            Request::Stop => Reply::Done,
        }
    }

    fn status(&self) -> StatusReport {
        StatusReport {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs(),
            config_file: self.config_file.clone(),
            spec_dir: self.config().daemon.spec_dir.clone(),
            services: self.supervisor.states(),
            grants: self.grant_lines(),
        }
    }

    fn grant_lines(&self) -> Vec<GrantLine> {
        let agent = self.agent.read().unwrap_or_else(PoisonError::into_inner);
        let grants = agent.as_ref().map(Agent::grants).unwrap_or_default();
        drop(agent);
        // Who has granted nothing need not be asked.
        let mut usage = BTreeMap::new();
        if !grants.is_empty() {
            usage.extend(Kind::ALL.into_iter().filter_map(|kind| self.supervisor.usage(kind)).flatten());
        }
        let line = |grant: GrantView| GrantLine {
            usage: usage.get(&grant.grant.to_string()).map(Usage::from),
            device: grant.device,
            container: grant.container,
            pid: grant.init_pid,
        };
        grants.into_iter().map(line).collect()
    }

    fn doctor(&self) -> DoctorReport {
        let config = self.config().clone();
        let devices =
            Kind::ALL.into_iter().map(|kind| doctor::judge(kind, self.examine(kind, &config))).collect();
        DoctorReport {
            daemon: Finding::Ok { detail: format!("running, process {}", std::process::id()) },
            checks: facts::host_checks(&config),
            devices,
        }
    }

    fn examine(&self, kind: Kind, config: &Config) -> Evidence {
        if !config.devices.is_on(kind) {
            return Evidence::Off;
        }
        if facts::device(kind, config).is_none() {
            return Evidence::NotBuiltIn;
        }
        match self.supervisor.report(kind) {
            Ok(report) => Evidence::Answered { engine: report.engine, troubles: report.troubles },
            Err(reason) => Evidence::Silent { reason },
        }
    }

    /// Takes the configuration file as it stands now; on an error everything stays as it was.
    fn reload(&self) -> anyhow::Result<()> {
        let mut current = self.config();
        let new = Config::load(&self.config_file)?;
        if new.daemon != current.daemon || new.engines != current.engines {
            bail!("the sections [daemon] and [engines] take effect by `lighter restart`");
        }
        let plans = plans(&new)?;
        // Grants end while the service that holds their memory is still there to confirm it.
        if let Some(agent) = &*self.agent.read().unwrap_or_else(PoisonError::into_inner) {
            agent.set_devices(facts::endpoints(&new))?;
        }
        self.supervisor.apply(&plans).context("the services cannot follow the change")?;
        publish::publish(&new)?;
        tracing::info!("the configuration was read again");
        *current = new;
        Ok(())
    }
}
