"""The live page as files: who may have them, what they may load, and that they can be left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import app
from app.live.page_files import POLICY

PAGE = Path(app.__file__).parent / "live" / "page"
SHIPPED = [path for path in sorted(PAGE.rglob("*")) if path.is_file()]


async def get(application, path, **headers):
    response = await application.test_client().get(path, headers=headers)
    return response, await response.get_data()


async def test_the_page_loads_scripts_and_styles_of_its_own(application):
    response, page = await get(application, "/")
    assert response.status_code == 200
    loaded = re.findall(r'(?:href|src)="(page/[^"]+)"', page.decode())
    assert "page/main.js" in loaded
    assert len([name for name in loaded if name.endswith(".css")]) >= 3
    for name in loaded:
        response, data = await get(application, f"/{name}")
        assert response.status_code == 200, name
        assert data == (PAGE.parent / name).read_bytes()
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        assert response.headers["Content-Type"].partition(";")[0] == kind


@pytest.mark.parametrize("file", [path for path in SHIPPED if path.suffix == ".js"], ids=lambda path: path.name)
def test_scripts_import_what_is_there(file):
    for name in re.findall(r'^(?:import|export)[^"]*from "([^"]+)"', file.read_text(), re.MULTILINE):
        assert (file.parent / name).is_file(), name


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.name)
def test_nothing_comes_from_another_host(file):
    text = file.read_text()
    text = text.replace("http://www.w3.org/2000/svg", "").replace(r"https?:\/\/", "")  # a name; a pattern of links
    assert not re.search(r"https?://|[\"'(]//", text)
    assert "@import" not in text
    assert "url(" not in text.replace('"url(#arrow)"', "")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.name)
def test_text_never_becomes_markup_or_code(file):
    text = file.read_text()
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "eval(",
        "new Function",
    ):
        assert name not in text
    if file.suffix == ".html":
        assert not re.search(r"\son\w+=|style=|<style|<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/style/base.css", "/page/icon.svg"])
async def test_a_strict_policy_comes_with_each_file(application, path):
    response, _ = await get(application, path)
    assert response.headers["Content-Security-Policy"] == POLICY
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    parts = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert parts["default-src"] == "'none'"
    assert parts["script-src"] == parts["style-src"] == parts["connect-src"] == "'self'"
    assert parts["frame-ancestors"] == "'none'"


async def test_the_files_need_no_key_and_reveal_nothing(make_application):
    application = make_application(api_key="user-key", served_model_name=("secret-model",))
    response, page = await get(application, "/")
    assert response.status_code == 200
    assert b"secret-model" not in page
    assert (await get(application, "/page/main.js"))[0].status_code == 200


@pytest.mark.parametrize("path", ["docs.html", "index.html", "../table.py", "..%2Ftable.py", "style", "", "main.js/"])
async def test_only_the_pages_own_files_are_there(application, path):
    assert (await get(application, f"/page/{path}"))[0].status_code == 404


async def test_a_file_is_sent_once(application):
    first, _ = await get(application, "/page/main.js")
    tag = first.headers["ETag"]
    again, data = await get(application, "/page/main.js", **{"If-None-Match": tag})
    assert (again.status_code, data) == (304, b"")
    other, data = await get(application, "/page/main.js", **{"If-None-Match": '"other"'})
    assert other.status_code == 200
    assert data


async def test_a_proxys_path_stands_in_the_addresses(make_application):
    _, page = await get(make_application(fastapi_root_path="/llm"), "/llm/")
    assert b'src="/llm/page/main.js"' in page


async def test_the_page_can_be_left_out(make_application):
    application = make_application(disable_page=True)
    for path in ("/", "/page/main.js", "/stage", "/stage?frames=1", "/stage/requests/x"):
        assert (await get(application, path))[0].status_code == 404, path
    assert (await get(application, "/docs"))[0].status_code == 200
    _, described = await get(application, "/openapi.json")
    assert b'"/stage"' not in described


def test_every_folder_of_the_page_is_packaged():
    """By the rules of pyproject.toml, as setuptools reads them."""
    import tomllib
    from glob import glob

    package = Path(app.__file__).parent
    root = package.parent
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["app"]
    packed = {path for pattern in data for path in glob(str(package / pattern), recursive=True)}
    assert {str(path) for path in (*SHIPPED, package / "server" / "docs.html")} <= packed
