from html.parser import HTMLParser

from weft.trainer.report_page import page


def test_a_page_needs_nothing_beside_itself():
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    text = page("a <b> & c", "<p>body</p>")
    Reader().feed(text)
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "<p>body</p>" in text
    assert not [tag for tag, attrs in seen if tag == "script" or {"src", "href"} & set(attrs)]
    assert "http" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in text
