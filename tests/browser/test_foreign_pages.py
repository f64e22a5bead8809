"""What a page of another origin gets from Prefect's server: nothing. Its API starts commands, so whoever may call it
is this user.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from config.ports import HOST, free_port
from tasks.servers.plans import prefect_plan
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import start, stop
from tests.browser.conftest import OPTIONS, PATIENCE_MILLISECONDS, START_MILLISECONDS, chromium

pytestmark = [pytest.mark.browser, pytest.mark.integration, pytest.mark.timeout(1200)]

ELSEWHERE = "attacker.example"
"""A name of somebody else that resolves to this machine, which a browser takes for the origin it loaded the page
from.
"""
TRUSTING = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"
"""A browser that lets pages of the network ask this machine, as most have done."""

ATTACKS = """async ([api, deployment, flow]) => {
  const said = {};
  const attempt = async (name, work) => {
    try { said[name] = await work() } catch (error) { said[name] = 'nothing: ' + error.name }
  };
  const read = async (path, options) => {
    const answer = await fetch(api + path, options);
    return answer.type === 'opaque' ? 'nothing: opaque' : answer.status + ' ' + await answer.text();
  };
  const post = (body, type, more) => ({method: 'POST', body: JSON.stringify(body), headers: {'Content-Type': type}, ...more});
  const run = {name: 'owned', job_variables: {command: 'touch /tmp/owned'}};
  const made = {name: 'owned', flow_id: flow, work_pool_name: 'cpu', job_variables: run.job_variables};
  await attempt('read', () => read('/flows/' + flow));
  await attempt('settings', () => read('/admin/settings'));
  await attempt('list', () => read('/deployments/filter', post({}, 'application/json')));
  await attempt('list as text', () => read('/deployments/filter', post({}, 'text/plain')));
  await attempt('create', () => read('/deployments/', post(made, 'application/json')));
  await attempt('create as text', () => read('/deployments/', post(made, 'text/plain', {mode: 'no-cors'})));
  await attempt('create without type', () => read('/deployments/', {method: 'POST', body: new Blob([JSON.stringify(made)]), mode: 'no-cors'}));
  await attempt('run', () => read(`/deployments/${deployment}/create_flow_run`, post(run, 'application/json')));
  await attempt('run as text', () => read(`/deployments/${deployment}/create_flow_run`, post(run, 'text/plain', {mode: 'no-cors'})));
  await attempt('run with a token', async () => {
    const token = JSON.parse((await read('/csrf-token?client=owned')).slice(4)).token;
    const headers = {'Content-Type': 'application/json', 'Prefect-Csrf-Token': token, 'Prefect-Csrf-Client': 'owned'};
    return read(`/deployments/${deployment}/create_flow_run`, {method: 'POST', body: JSON.stringify(run), headers});
  });
  await attempt('run by a form', () => new Promise(done => {
    const frame = document.body.appendChild(Object.assign(document.createElement('iframe'), {name: 'hidden'}));
    const form = document.body.appendChild(document.createElement('form'));
    Object.assign(form, {method: 'POST', enctype: 'text/plain', target: 'hidden', action: `${api}/deployments/${deployment}/create_flow_run`});
    form.appendChild(Object.assign(document.createElement('input'), {name: '{"name": "owned", "a": "', value: '"}'}));
    frame.onload = () => done('nothing: not readable');
    form.submit();
  }));
  for (const path of ['/events/out', '/logs/out', '/events/in']) {
    await attempt('socket ' + path, () => new Promise(done => {
      const socket = new WebSocket(api.replace('http', 'ws') + path, ['prefect']);
      socket.onopen = () => socket.send(JSON.stringify({type: 'auth', token: null}));
      socket.onmessage = message => done('heard ' + message.data);
      socket.onerror = socket.onclose = () => done('nothing: closed');
    }));
  }
  return said;
}"""


class Target(NamedTuple):
    """A Prefect server with a deployment and a pool that runs commands."""

    client: SyncPrefectClient
    port: int
    key: str
    ids: list[str]
    """Of the deployment and its flow: the attacker has guessed them."""

    def state(self) -> dict[str, Any]:
        """What an attack could have changed."""
        deployments = {deployment.name: deployment.job_variables for deployment in self.client.read_deployments()}
        runs = sorted(run.name for run in self.client.read_flow_runs())
        return {"deployments": deployments, "runs": runs}


@pytest.fixture(scope="module", params=[True, False], ids=["with-key", "no-auth"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    chromium()
    root, port = tmp_path_factory.mktemp("target"), free_port()
    ours = {PREFECT_API_URL: f"http://{HOST}:{port}/api", PREFECT_API_AUTH_STRING: api_key(root)}
    try:
        start(root, [prefect_plan(root, port, with_key=request.param)])
        with temporary_settings(ours), get_client(sync_client=True) as client:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name="cpu", type="process", base_job_template=template))
            flow = client.create_flow_from_name("flow")
            deployment = client.create_deployment(flow, name="known", entrypoint="x.py:flow", work_pool_name="cpu")
            yield Target(client, port, api_key(root), [str(deployment), str(flow)])
    finally:
        stop(root)


@pytest.fixture(scope="module")
def page(target: Target) -> Iterator[Page]:
    """A browser that takes the attacker's name for an address of this machine. It starts after Prefect's client: both
    want the event loop.
    """
    with sync_playwright() as playwright:
        options = [*OPTIONS, f"--host-resolver-rules=MAP {ELSEWHERE} {HOST}", TRUSTING]
        launched = playwright.chromium.launch(executable_path=chromium(), args=options, timeout=START_MILLISECONDS)
        opened = launched.new_context().new_page()
        opened.set_default_timeout(PATIENCE_MILLISECONDS)
        yield opened
        launched.close()


@pytest.fixture(scope="module")
def other_port() -> Iterator[int]:
    """A web server of somebody else on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><body>")

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def got_nothing(said: dict[str, str]) -> bool:
    """Whether each attempt came to nothing that could be read: an error, an answer without content, or a refusal."""
    return all(answer.startswith(("nothing: ", "401 ", "403 ")) for answer in said.values())


@pytest.mark.parametrize("name", [HOST, ELSEWHERE])
def test_a_page_of_another_origin_cannot_list_create_or_run(
    target: Target, page: Page, other_port: int, name: str
) -> None:
    before = target.state()
    assert (list(before["deployments"]), before["runs"]) == (["known"], [])
    page.goto(f"http://{name}:{other_port}/")
    said = page.evaluate(ATTACKS, [f"http://{HOST}:{target.port}/api", *target.ids])
    assert len(said) == 14
    assert got_nothing(said), json.dumps(said, indent=1)
    assert target.state() == before


def test_a_name_that_now_resolves_to_this_machine_is_refused(target: Target, page: Page) -> None:
    """DNS rebinding: the page was loaded from the same name and port, so for the browser the server is its own."""
    before = target.state()
    page.route(
        f"http://{ELSEWHERE}:{target.port}/page",
        lambda route: route.fulfill(content_type="text/html", body="<!doctype html><body>"),
    )
    page.goto(f"http://{ELSEWHERE}:{target.port}/page")
    said = page.evaluate(ATTACKS, [f"http://{ELSEWHERE}:{target.port}/api", *target.ids])
    assert got_nothing(said), json.dumps(said, indent=1)
    assert target.state() == before


def test_another_page_cannot_show_ours_in_a_frame(target: Target, page: Page, other_port: int) -> None:
    page.goto(f"http://{HOST}:{other_port}/")
    shown = page.evaluate(
        """async url => {
          const frame = Object.assign(document.createElement('iframe'), {src: url});
          await new Promise(done => { frame.onload = done; document.body.appendChild(frame) });
        }""",
        f"http://{HOST}:{target.port}/v2/dashboard",
    )
    assert shown is None
    assert page.frames[1].url == "chrome-error://chromewebdata/"


def test_our_own_pages_ask_nobody_else(target: Target, page: Page) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(urlsplit(request.url).netloc))
    page.goto(f"http://{HOST}:{target.port}/api/health")
    page.evaluate("key => localStorage.setItem('prefect-password', btoa(key))", target.key)
    page.goto(f"http://{HOST}:{target.port}/v2/deployments")
    expect(page.get_by_role("link", name="known")).to_be_visible()
    page.wait_for_timeout(3000)
    assert {host for host in requests if host} == {f"{HOST}:{target.port}"}
