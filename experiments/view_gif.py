"""The moving picture of docs/view.html in README: one token is dragged, in two of its cards.

    python experiments/view_gif.py

The page is filmed in Debian's chromium (pip install selenium, apt-get install chromium
chromium-driver) as wide as a phone, with the rows of GRPO and GSPO alone, so that its text can be
read there. Writes docs/figures/view.gif.
"""

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs/figures/view.gif"
WIDTH, SCALE = 390, 2                   # of the window in CSS pixels; how much larger the pictures
DRAGS = (("drag0-2", 0.25), ("drag1-4", -0.3))    # tokens, and where they end
STEPS = 12
READ, SHOWN = 2200, 110                 # milliseconds of a picture to read and of one in a move
PREPARE = """
const hide = name => document.querySelectorAll(`.grid [id^=${name}], .grid [id^=place${name}]`);
for (const name of ["gspo_token", "gmpo", "cispo"]) {
  hide(name).forEach(cell => cell.remove());
  document.querySelectorAll(".grid .name").forEach(e => e.textContent === name && e.remove());
}
FIVE.length = 2;
document.querySelectorAll(".page > *").forEach(e => { e.hidden = true; });
const toy = document.querySelector(".drag");
toy.hidden = false;
[...toy.children].forEach(e => { e.hidden = e.id !== "dragged"; });
document.querySelectorAll(".response").forEach((e, i) => { e.hidden = i > 1; });
document.querySelector(".inspector").hidden = true;
for (const e of document.querySelectorAll("[hidden]")) e.style.setProperty("display", "none");
for (const e of document.querySelectorAll(".sum, .name, .place, .cell, .grid .box")) {
  e.style.fontSize = "15px";
}
document.querySelectorAll(".grid .cell").forEach(e => { e.style.fontSize = "14px"; });
dragged.logw = START.map(one => one.logw.map(() => 0));
drawDragged();
"""


def film(page):
    """The pictures of the page, as [(image, milliseconds)]."""
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(word)
    options.binary_location = shutil.which("chromium")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    pictures = []

    def shoot(milliseconds):
        image = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
        pictures.append((image.convert("RGB"), milliseconds))

    with webdriver.Chrome(options, service) as browser:
        def size(height):
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
                "width": WIDTH, "height": height, "deviceScaleFactor": SCALE, "mobile": True})
        size(800)
        browser.get(page.as_uri())
        browser.execute_script(PREPARE)
        size(browser.execute_script(
            "return Math.ceil(document.getElementById('dragged').getBoundingClientRect().bottom)"
            " + 8"))
        shoot(READ)
        for token, end in DRAGS:
            row, t = token.removeprefix("drag").split("-")
            for step in range(1, STEPS + 1):
                browser.execute_script("moveToken(Number(arguments[0]), Number(arguments[1]), "
                                       "arguments[2])", row, t, end * step / STEPS)
                shoot(READ if step == STEPS else SHOWN)
    return pictures


def main():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        sys.exit("view_gif.py: chromium is not there: apt-get install chromium chromium-driver")
    images, times = zip(*film(ROOT / "docs/view.html"))
    together = Image.new("RGB", (images[0].width, images[0].height * len(images)))
    for i, image in enumerate(images):
        together.paste(image, (0, i * image.height))
    palette = together.quantize(64)                 # one for all pictures makes the file smaller
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    first.save(FILE, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)
    print(f"{FILE.relative_to(ROOT)}: {len(images)} pictures, {FILE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
